#include "simulate/simulation.hpp"

#include <algorithm>
#include <functional>
#include <limits>
#include <queue>
#include <stdexcept>
#include <utility>

#include "simulate/simulation_state.hpp"

namespace paceline::simulate {
namespace {

using executor::Flow;
using executor::StepKind;

class Simulation {
  public:
    explicit Simulation(const Scenario& scenario);
    SimulationResult run();

  private:
    void add_route(std::uint32_t number);
    void push(double at, std::uint32_t order, EventKind what, std::uint32_t subject, std::uint32_t rank = 0,
              std::uint32_t version = 0, double nbytes = 0);
    void handle(const Event& event);
    void allocate_links();
    void resume(std::uint32_t rank);
    void try_send(std::uint32_t stream);
    void send_what_is_ready();
    void send(MessageStream& stream, std::uint32_t number);
    void begin_piece(MessageStream& stream, std::uint32_t number);
    void note_change(MessageStream& stream, std::uint32_t number);
    void piece_left(MessageStream& stream, std::uint32_t number);
    void piece_arrived(MessageStream& stream, std::uint32_t number, double nbytes);
    void try_consume(std::uint32_t stream);
    void consume(MessageStream& stream, double nbytes);
    void try_reduce(std::uint32_t rank, std::uint32_t step);
    void advance(std::uint32_t rank, std::uint32_t step, double nbytes);
    void wake_dependents(std::uint32_t rank, std::uint32_t step, bool is_finished);
    std::size_t advance_along(std::uint32_t rank, const std::vector<std::uint32_t>& steps, std::size_t at,
                              double nbytes);
    void schedule_departure(MessageStream& stream, std::uint32_t number);

    SimulatedRank& source(const MessageStream& stream) { return ranks_[stream.route->source]; }
    SimulatedRank& target(const MessageStream& stream) { return ranks_[stream.route->target]; }

    const Scenario& scenario_;
    FairShares shares_;
    std::vector<SimulatedRank> ranks_;
    std::vector<MessageStream> streams_;
    std::priority_queue<Event, std::vector<Event>, std::greater<>> events_;
    std::vector<std::uint32_t> pending_;  // streams that may advance
    std::vector<std::uint32_t> changed_;  // streams that began or ended a piece at the current time
    std::uint64_t events_so_far_ = 0;
    double now_ = 0;
    SimulationResult result_;
};

const Flow* find_flow(const executor::Schedule& schedule, int peer) {
    const auto found =
        std::find_if(schedule.flows.begin(), schedule.flows.end(), [&](const Flow& flow) { return flow.peer == peer; });
    return found == schedule.flows.end() ? nullptr : &*found;
}

Simulation::Simulation(const Scenario& scenario) : scenario_(scenario), shares_(scenario.capacities) {
    result_.carried_nbytes.assign(scenario.capacities.size(), 0);
    for (const Program& program : scenario.programs) {
        ranks_.push_back({RankProgress(program.schedule, scenario.block_nbytes), program.speed});
        ranks_.back().is_reducing.resize(program.schedule->steps.size());
    }
    streams_.reserve(scenario.routes.size());
    for (std::uint32_t i = 0; i < scenario.routes.size(); ++i) add_route(i);
    for (std::uint32_t i = 0; i < ranks_.size(); ++i) push(scenario.programs[i].arrival_s, 0, EventKind::arrival, i);
}

void Simulation::add_route(std::uint32_t number) {
    const Route& route = scenario_.routes[number];
    const Flow* from = find_flow(ranks_.at(route.source).progress.schedule(), route.source_peer);
    const Flow* to = find_flow(ranks_.at(route.target).progress.schedule(), route.target_peer);
    if (from == nullptr || to == nullptr)
        throw std::invalid_argument("a route joins programs that do not know each other");
    shares_.add_route(route.uses, route.max_rate);
    const executor::Schedule& schedule = ranks_[route.source].progress.schedule();
    const int distance = (route.source_peer - schedule.rank + schedule.size) % schedule.size;
    streams_.push_back({&route, &from->sends, &to->receives, static_cast<std::uint32_t>(distance)});
    ranks_[route.source].streams_to[route.source_peer] = number;
    ranks_[route.target].streams_from[route.target_peer] = number;
}

void Simulation::push(double at, std::uint32_t order, EventKind what, std::uint32_t subject, std::uint32_t rank,
                      std::uint32_t version, double nbytes) {
    events_.push({at, order, ++events_so_far_, what, subject, rank, version, nbytes});
}

SimulationResult Simulation::run() {
    while (!events_.empty()) {
        now_ = events_.top().at;
        const double instant = now_ * (1 + 1e-12);
        while (!events_.empty() && events_.top().at <= instant) {
            const Event event = events_.top();
            events_.pop();
            handle(event);
        }
        send_what_is_ready();
        allocate_links();
    }
    for (const SimulatedRank& rank : ranks_) {
        if (!rank.progress.is_over()) throw std::invalid_argument("the schedules wait for ever");
        result_.ends_s.push_back(rank.end_s);
    }
    return std::move(result_);
}

void Simulation::handle(const Event& event) {
    switch (event.what) {
        case EventKind::arrival:
            ranks_[event.subject].has_arrived = true;
            ranks_[event.subject].end_s = now_;
            return resume(event.subject);
        case EventKind::opened:
            streams_[event.subject].is_opening = false;
            streams_[event.subject].is_open = true;
            return try_send(event.subject);
        case EventKind::moved:
            if (event.version == streams_[event.subject].version) piece_left(streams_[event.subject], event.subject);
            return;
        case EventKind::received:
            return piece_arrived(streams_[event.subject], event.subject, event.nbytes);
        case EventKind::consumed:
            consume(streams_[event.subject], event.nbytes);
            streams_[event.subject].is_consuming = false;
            return try_consume(event.subject);
        case EventKind::reduced:
            ranks_[event.rank].is_reducing[event.subject] = false;
            advance(event.rank, event.subject, event.nbytes);
            return try_reduce(event.rank, event.subject);
    }
}

// Updates FairShares for the changed routes and reschedules the ends of the pieces whose rates changed.
void Simulation::allocate_links() {
    for (const std::uint32_t number : changed_) {
        MessageStream& stream = streams_[number];
        stream.has_changed = false;
        if (stream.is_moving == stream.is_shared) {
            if (stream.is_moving) schedule_departure(stream, number);
            continue;
        }
        stream.is_shared = stream.is_moving;
        stream.is_moving ? shares_.open(number) : shares_.close(number);
    }
    changed_.clear();
    for (const std::uint32_t number : shares_.allocate()) {
        MessageStream& stream = streams_[number];
        const double rate = shares_.rate(number);
        if (rate == stream.rate && stream.version != 0 && stream.since_s < now_) continue;
        stream.left -= stream.rate * (now_ - stream.since_s);
        stream.since_s = now_;
        stream.rate = rate;
        schedule_departure(stream, number);
    }
}

void Simulation::schedule_departure(MessageStream& stream, std::uint32_t number) {
    const double takes = std::max(0.0, stream.left) / stream.rate;
    push(now_ + takes, stream.order, EventKind::moved, number, 0, ++stream.version);
}

// Resumes a rank's sends, receives and local steps.
void Simulation::resume(std::uint32_t number) {
    SimulatedRank& rank = ranks_[number];
    for (const std::uint32_t step : rank.progress.schedule().local) try_reduce(number, step);
    for (const auto& [peer, stream] : rank.streams_to) try_send(stream);
    for (const auto& [peer, stream] : rank.streams_from) try_consume(stream);
}

void Simulation::try_send(std::uint32_t number) {
    if (!std::exchange(streams_[number].is_pending, true)) pending_.push_back(number);
}

// Starts the pieces that can be sent. Runs after all events with the same time, so the order of these events does not
// affect the lengths of pieces.
void Simulation::send_what_is_ready() {
    std::sort(pending_.begin(), pending_.end(), [&](std::uint32_t one, std::uint32_t other) {
        return std::pair(streams_[one].order, one) < std::pair(streams_[other].order, other);
    });
    for (const std::uint32_t number : pending_) {
        streams_[number].is_pending = false;
        send(streams_[number], number);
    }
    pending_.clear();
}

void Simulation::send(MessageStream& stream, std::uint32_t number) {
    SimulatedRank& from = source(stream);
    if (!from.has_arrived || stream.is_moving || stream.is_opening || stream.sending == stream.sends->size()) return;
    if (from.progress.ahead(*stream.sends, stream.sending, scenario_.piece_nbytes) <= kMinBytes) return;
    if (stream.is_open || stream.route->overhead_s == 0) return begin_piece(stream, number);
    SimulatedRank& to = target(stream);
    const double begin = std::max({now_, from.out_free_s, to.in_free_s});
    from.out_free_s = to.in_free_s = begin + stream.route->overhead_s;
    stream.is_opening = true;
    push(from.out_free_s, stream.order, EventKind::opened, number);
}

void Simulation::begin_piece(MessageStream& stream, std::uint32_t number) {
    stream.piece = source(stream).progress.ahead(*stream.sends, stream.sending, scenario_.piece_nbytes);
    stream.left = stream.piece;
    stream.since_s = now_;
    stream.rate = stream.is_shared ? stream.rate : 0;
    stream.is_moving = true;
    note_change(stream, number);
    if (scenario_.records && stream.begins_s.size() == stream.sending) stream.begins_s.push_back(now_);
}

void Simulation::note_change(MessageStream& stream, std::uint32_t number) {
    if (!std::exchange(stream.has_changed, true)) changed_.push_back(number);
}

void Simulation::piece_left(MessageStream& stream, std::uint32_t number) {
    ++stream.version;
    for (const LinkUse& use : stream.route->uses) result_.carried_nbytes[use.link] += use.weight * stream.piece;
    push(now_ + stream.route->latency_s, stream.order, EventKind::received, number, 0, 0, stream.piece);
    const std::size_t before = stream.sending;
    stream.sending = advance_along(stream.route->source, *stream.sends, before, stream.piece);
    if (scenario_.records)
        while (stream.begins_s.size() < stream.sending) stream.begins_s.push_back(now_);
    if (stream.sending != before && stream.sending < stream.sends->size())
        stream.is_open &= (*stream.sends)[stream.sending] == (*stream.sends)[stream.sending - 1] + 1;
    stream.is_moving = false;
    try_send(number);
    note_change(stream, number);
}

void Simulation::piece_arrived(MessageStream& stream, std::uint32_t number, double nbytes) {
    stream.waiting += nbytes;
    if (scenario_.records) {
        stream.arrived += nbytes;
        const RankProgress& from = source(stream).progress;
        while (stream.recorded < stream.sends->size()) {
            const std::uint32_t step = (*stream.sends)[stream.recorded];
            const double all = from.state(step).nbytes;
            if (stream.arrived < all - kMinBytes) break;
            stream.arrived -= all;
            result_.transfers.push_back({number, step, all, stream.begins_s[stream.recorded++], now_});
        }
    }
    try_consume(number);
}

// Lets receiving steps consume as many of the arrived bytes as possible. Only reductions take simulated time.
void Simulation::try_consume(std::uint32_t number) {
    MessageStream& stream = streams_[number];
    SimulatedRank& to = target(stream);
    if (!to.has_arrived || stream.is_consuming) return;
    stream.is_consuming = true;
    while (stream.waiting > kMinBytes) {
        const double may =
            to.progress.ahead(*stream.receives, stream.receiving, std::min(stream.waiting, scenario_.piece_nbytes));
        if (may <= kMinBytes) break;
        const std::uint32_t step = (*stream.receives)[stream.receiving];
        if (to.progress.schedule().steps[step].kind == StepKind::reduce && scenario_.gamma_s_per_byte != 0) {
            to.reduces_until_s = std::max(now_, to.reduces_until_s) + may * scenario_.gamma_s_per_byte / to.speed;
            return push(to.reduces_until_s, stream.order, EventKind::consumed, number, 0, 0, may);
        }
        consume(stream, may);
    }
    stream.is_consuming = false;
}

// `is_consuming` prevents the steps resumed below from consuming the same bytes.
void Simulation::consume(MessageStream& stream, double nbytes) {
    stream.waiting -= nbytes;
    stream.receiving = advance_along(stream.route->target, *stream.receives, stream.receiving, nbytes);
}

// Advances a local step. A copy takes no time; converting a byte takes as long as reducing it.
void Simulation::try_reduce(std::uint32_t number, std::uint32_t step) {
    SimulatedRank& rank = ranks_[number];
    const SimulatedStep& state = rank.progress.state(step);
    if (!rank.has_arrived || rank.is_reducing[step] || state.is_finished) return;
    const double may = rank.progress.ahead({&step, 1}, 0, std::numeric_limits<double>::max());
    if (may <= kMinBytes) return;
    if (rank.progress.schedule().steps[step].kind == StepKind::copy || scenario_.gamma_s_per_byte == 0)
        return advance(number, step, may);
    const double piece = std::min(may, scenario_.piece_nbytes);
    rank.is_reducing[step] = true;
    rank.reduces_until_s = std::max(now_, rank.reduces_until_s) + piece * scenario_.gamma_s_per_byte / rank.speed;
    push(rank.reduces_until_s, step, EventKind::reduced, step, number, 0, piece);
}

// Advances a step and resumes the steps that depend on it.
void Simulation::advance(std::uint32_t number, std::uint32_t step, double nbytes) {
    const bool is_finished = ranks_[number].progress.advance(step, nbytes);
    if (is_finished) ranks_[number].end_s = now_;
    wake_dependents(number, step, is_finished);
}

void Simulation::wake_dependents(std::uint32_t number, std::uint32_t step, bool is_finished) {
    SimulatedRank& rank = ranks_[number];
    const executor::Schedule& schedule = rank.progress.schedule();
    if (is_finished && schedule.blocks == 0) return resume(number);
    for (const std::uint32_t follower : rank.progress.dependents(step)) {
        const executor::Step& what = schedule.steps[follower];
        if (is_local(what.kind))
            try_reduce(number, follower);
        else if (what.kind == StepKind::send)
            try_send(rank.streams_to.at(what.peer));
        else
            try_consume(rank.streams_from.at(what.peer));
    }
}

// Advances the steps at index `at` and later; returns the index of the first unfinished step. They advance before all
// other steps, so the result does not depend on the number of messages in the stream.
std::size_t Simulation::advance_along(std::uint32_t number, const std::vector<std::uint32_t>& steps, std::size_t at,
                                      double nbytes) {
    SimulatedRank& rank = ranks_[number];
    const std::size_t first = at;
    std::size_t moved = at;
    while (at < steps.size() && nbytes > kMinBytes) {
        const SimulatedStep& state = rank.progress.state(steps[at]);
        const double part = std::min(nbytes, state.nbytes - state.done);
        nbytes -= part;
        moved = at + 1;
        if (!rank.progress.advance(steps[at], part)) break;
        rank.end_s = now_;
        ++at;
    }
    for (std::size_t each = first; each < moved; ++each) wake_dependents(number, steps[each], each < at);
    return at;
}

}  // namespace

SimulationResult simulate(const Scenario& scenario) {
    return Simulation(scenario).run();
}

}  // namespace paceline::simulate
