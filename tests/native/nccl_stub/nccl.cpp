// A library with NCCL's functions that uses the CPU: tests of the nccl engine load it where there is no GPU.
//
// Streams are threads that run their jobs in order, so calls return before they have completed, as NCCL's do. A
// communicator is a file that its processes map, with a ring of bytes from each rank to each other rank. Every call is
// checked and logged to the file STUB_NCCL_LOG. These environment variables, read at each call, change the behaviour:
//   STUB_NCCL_FOLDER       the folder of the communicators' files
//   STUB_NCCL_VERSION      the version that ncclGetVersion reports (22105)
//   STUB_NCCL_IN_PROGRESS  how often ncclCommGetAsyncError returns ncclInProgress after a call (0)
//   STUB_NCCL_ASYNC_ERROR  the error that ncclCommGetAsyncError returns once a call is in a stream (none)
//   STUB_NCCL_LOSES        the function whose work never ends (none)
//   STUB_NCCL_REFUSES      the function that returns ncclInvalidArgument (none)

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <random>
#include <sstream>
#include <string>

#include "reduce.hpp"
#include "stream.hpp"
#include "transfer.hpp"

using namespace stub;

namespace {

enum Result { SUCCESS = 0, SYSTEM_ERROR = 2, INVALID_ARGUMENT = 4, INVALID_USAGE = 5, IN_PROGRESS = 7 };

constexpr unsigned MAGIC = 0xcafebeef;

thread_local std::string last_error;

int refuse(int result, const std::string& why) {
    last_error = why;
    return result;
}

const char* setting(const char* name, const char* otherwise) {
    const char* value = std::getenv(name);
    return value != nullptr && *value != 0 ? value : otherwise;
}

void record(const std::string& line) {
    static std::mutex mutex;
    const std::lock_guard lock(mutex);
    if (const char* path = std::getenv("STUB_NCCL_LOG")) {
        std::ofstream(path, std::ios::app) << line << "\n";
    }
}

struct Pending {
    Communicator* comm;
    Stream* stream;
    std::function<void(Job&)> add;
    bool is_lost;
};

thread_local int depth = 0;
thread_local std::vector<Pending> pending;

int launch() {
    std::vector<Pending> calls;
    calls.swap(pending);
    if (calls.empty()) {
        return SUCCESS;
    }
    // A group is one job in its stream; these tests use one stream per group.
    auto job = std::make_shared<Job>();
    Communicator* comm = calls.front().comm;
    Stream* stream = calls.front().stream;
    for (const Pending& call : calls) {
        if (call.comm != comm || call.stream != stream) {
            return refuse(INVALID_USAGE, "the stub takes one communicator and one stream a group");
        }
        job->is_lost = job->is_lost || call.is_lost;
    }
    stream->give([job, comm, calls] {
        for (const Pending& call : calls) {
            call.add(*job);
        }
        run(*comm, *job);
    });
    comm->failed = std::getenv("STUB_NCCL_ASYNC_ERROR") != nullptr;
    comm->polls = std::atoi(setting("STUB_NCCL_IN_PROGRESS", "0"));
    return comm->polls > 0 ? IN_PROGRESS : SUCCESS;
}

struct Arguments {
    size_t count;
    int type;
    int op;
    int peer;
};

int take(const char* name, Communicator* comm, Stream* stream, const Arguments& of, std::function<void(Job&)> add) {
    std::ostringstream line;
    line << name << " count=" << of.count << " type=" << of.type << " op=" << of.op << " peer=" << of.peer
         << " depth=" << depth << " stream=" << stream;
    record(line.str());
    if (setting("STUB_NCCL_REFUSES", "") == std::string(name)) {
        return refuse(INVALID_ARGUMENT, std::string(name) + " was told to refuse");
    }
    if (comm == nullptr || comm->aborted || comm->finalized || !comm->ready || comm->polls > 0) {
        return refuse(INVALID_USAGE, std::string(name) + ": the communicator is not ready");
    }
    if (stream == nullptr || of.count == 0 || of.type < 0 || of.type > 9 || of.op < SUM || of.op > AVG ||
        of.peer >= comm->size) {
        return refuse(INVALID_ARGUMENT, std::string(name) + ": " + line.str());
    }
    pending.push_back({comm, stream, std::move(add), setting("STUB_NCCL_LOSES", "") == std::string(name)});
    return depth > 0 ? SUCCESS : launch();
}

void exchange(Job& job, const Communicator& comm, const std::function<char*(int)>& sent,
              const std::function<char*(int)>& received, size_t nbytes) {
    for (int peer = 0; peer < comm.size; ++peer) {
        if (peer == comm.rank) {
            continue;
        }
        if (char* memory = sent(peer)) {
            job.transfers.push_back({true, peer, memory, nbytes});
        }
        if (char* memory = received(peer)) {
            job.transfers.push_back({false, peer, memory, nbytes});
        }
    }
}

char* nowhere(int) {
    return nullptr;
}

// This rank receives all ranks' inputs (or none, if `reads` is false) and reduces them.
void gather_and_reduce(Job& job, const Communicator& comm, const std::function<char*(int)>& sent, const char* mine,
                       char* target, const Arguments& of, bool reads) {
    const size_t nbytes = of.count * ITEM_SIZES[of.type];
    std::vector<const char*> inputs(static_cast<size_t>(comm.size));
    for (int rank = 0; rank < comm.size; ++rank) {
        inputs[static_cast<size_t>(rank)] = job.keep(rank == comm.rank ? mine : nullptr, nbytes);
    }
    const auto received = [&](int peer) {
        return reads ? const_cast<char*>(inputs[static_cast<size_t>(peer)]) : nullptr;
    };
    exchange(job, comm, sent, received, nbytes);
    if (reads) {
        job.finish.push_back([inputs, target, of] { reduce(inputs, target, of.count, of.type, of.op); });
    }
}

}  // namespace

extern "C" {

struct UniqueId {
    char internal[128];
};

struct Config {
    size_t size;
    unsigned magic, version;
    int blocking;
};

int ncclGetVersion(int* version) {
    *version = std::atoi(setting("STUB_NCCL_VERSION", "22105"));
    return SUCCESS;
}

int ncclGetUniqueId(UniqueId* id) {
    std::memset(id, 0, sizeof *id);
    std::random_device random;
    std::snprintf(id->internal, sizeof id->internal, "%08x%08x", random(), random());
    record("ncclGetUniqueId");
    return SUCCESS;
}

const char* ncclGetErrorString(int result) {
    return result == INVALID_ARGUMENT ? "invalid argument" : "an error";
}

const char* ncclGetLastError(Communicator*) {
    return last_error.c_str();
}

int ncclCommInitRankConfig(Communicator** made, int size, UniqueId id, int rank, const Config* config) {
    record("ncclCommInitRankConfig size=" + std::to_string(size) + " rank=" + std::to_string(rank));
    if (config->magic != MAGIC || config->blocking != 0 || config->version < 21400 || config->size < sizeof(Config)) {
        return refuse(INVALID_ARGUMENT, "the configuration is not initialised, or blocks");
    }
    if (rank < 0 || rank >= size || size > MOST_RANKS) {
        return refuse(INVALID_ARGUMENT, "rank or size");
    }
    const std::string path = std::string(setting("STUB_NCCL_FOLDER", "/tmp")) + "/" + id.internal;
    const size_t nbytes = sizeof(Region) + sizeof(Ring) * static_cast<size_t>(size * size);
    const int file = open(path.c_str(), O_RDWR | O_CREAT, 0600);
    if (file < 0 || ftruncate(file, static_cast<off_t>(nbytes)) != 0) {
        return refuse(SYSTEM_ERROR, path);
    }
    auto comm = std::make_unique<Communicator>();
    comm->region = static_cast<Region*>(mmap(nullptr, nbytes, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0));
    close(file);
    comm->rank = rank;
    comm->size = size;
    comm->polls = std::atoi(setting("STUB_NCCL_IN_PROGRESS", "0"));
    comm->region->arrived.fetch_add(1);
    *made = comm.release();  // a handle is never reused, so that a late use of it is detected
    return IN_PROGRESS;
}

int ncclCommGetAsyncError(Communicator* comm, int* state) {
    if (!comm->ready) {
        comm->ready = comm->region->arrived.load() == comm->size;
        *state = comm->ready && comm->polls <= 0 ? SUCCESS : IN_PROGRESS;
    } else {
        *state = comm->polls > 0 ? IN_PROGRESS : SUCCESS;
    }
    if (*state == IN_PROGRESS) {
        comm->polls -= 1;
    } else if (comm->failed) {
        *state = std::atoi(setting("STUB_NCCL_ASYNC_ERROR", "0"));
    }
    return SUCCESS;
}

int ncclCommCount(Communicator* comm, int* count) {
    *count = comm->size;
    return SUCCESS;
}

int ncclCommUserRank(Communicator* comm, int* rank) {
    *rank = comm->rank;
    return SUCCESS;
}

int ncclCommFinalize(Communicator* comm) {
    record("ncclCommFinalize");
    comm->finalized = true;
    return SUCCESS;
}

int ncclCommDestroy(Communicator* comm) {
    record("ncclCommDestroy");
    return comm->finalized ? SUCCESS : refuse(INVALID_USAGE, "destroyed before it was finalized");
}

int ncclCommAbort(Communicator* comm) {
    record("ncclCommAbort");
    comm->aborted = true;
    return SUCCESS;
}

int ncclGroupStart() {
    ++depth;
    return SUCCESS;
}

int ncclGroupEnd() {
    if (depth == 0) {
        return refuse(INVALID_USAGE, "ncclGroupEnd without ncclGroupStart");
    }
    return --depth > 0 ? SUCCESS : launch();
}

int ncclAllReduce(const void* source, void* target, size_t count, int type, int op, Communicator* comm,
                  Stream* stream) {
    const Arguments of{count, type, op, -1};
    return take("ncclAllReduce", comm, stream, of, [=](Job& job) {
        char* mine = job.keep(source, count * ITEM_SIZES[type]);
        gather_and_reduce(job, *comm, [=](int) { return mine; }, mine, static_cast<char*>(target), of, true);
    });
}

int ncclReduce(const void* source, void* target, size_t count, int type, int op, int root, Communicator* comm,
               Stream* stream) {
    const Arguments of{count, type, op, root};
    return take("ncclReduce", comm, stream, of, [=](Job& job) {
        char* mine = job.keep(source, count * ITEM_SIZES[type]);
        const auto sent = [=](int peer) { return peer == root ? mine : nullptr; };
        gather_and_reduce(job, *comm, sent, mine, static_cast<char*>(target), of, comm->rank == root);
    });
}

int ncclReduceScatter(const void* source, void* target, size_t count, int type, int op, Communicator* comm,
                      Stream* stream) {
    const Arguments of{count, type, op, -1};
    return take("ncclReduceScatter", comm, stream, of, [=](Job& job) {
        const size_t nbytes = count * ITEM_SIZES[type];
        char* all = job.keep(source, nbytes * static_cast<size_t>(comm->size));
        const auto part = [=](int rank) { return all + nbytes * static_cast<size_t>(rank); };
        gather_and_reduce(job, *comm, part, part(comm->rank), static_cast<char*>(target), of, true);
    });
}

int ncclBroadcast(const void* source, void* target, size_t count, int type, int root, Communicator* comm,
                  Stream* stream) {
    return take("ncclBroadcast", comm, stream, {count, type, SUM, root}, [=](Job& job) {
        const size_t nbytes = count * ITEM_SIZES[type];
        if (comm->rank == root) {
            char* mine = job.keep(source, nbytes);
            exchange(job, *comm, [=](int) { return mine; }, nowhere, nbytes);
            job.finish.push_back([=] { std::memmove(target, mine, nbytes); });
        } else {
            exchange(
                job, *comm, nowhere, [=](int peer) { return peer == root ? static_cast<char*>(target) : nullptr; },
                nbytes);
        }
    });
}

int ncclAllGather(const void* source, void* target, size_t count, int type, Communicator* comm, Stream* stream) {
    return take("ncclAllGather", comm, stream, {count, type, SUM, -1}, [=](Job& job) {
        const size_t nbytes = count * ITEM_SIZES[type];
        char* mine = job.keep(source, nbytes);
        const auto part = [=](int rank) { return static_cast<char*>(target) + nbytes * static_cast<size_t>(rank); };
        exchange(job, *comm, [=](int) { return mine; }, part, nbytes);
        job.finish.push_back([=] { std::memcpy(part(comm->rank), mine, nbytes); });
    });
}

int ncclSend(const void* source, size_t count, int type, int peer, Communicator* comm, Stream* stream) {
    return take("ncclSend", comm, stream, {count, type, SUM, peer}, [=](Job& job) {
        const size_t nbytes = count * ITEM_SIZES[type];
        job.transfers.push_back({true, peer, job.keep(source, nbytes), nbytes});
    });
}

int ncclRecv(void* target, size_t count, int type, int peer, Communicator* comm, Stream* stream) {
    return take("ncclRecv", comm, stream, {count, type, SUM, peer}, [=](Job& job) {
        job.transfers.push_back({false, peer, static_cast<char*>(target), count * ITEM_SIZES[type]});
    });
}

// The stand-in for CUDA: streams, events and copies.

Stream* stubOpenStream() {
    return new Stream;
}

int64_t stubMark(Stream* stream) {
    return stream->given();
}

int stubPassed(Stream* stream, int64_t place) {
    return stream->passed(place) ? 1 : 0;
}

void stubWait(Stream* stream, int64_t place) {
    stream->wait(place);
}

void stubCopy(Stream* stream, const void* source, void* target, size_t nbytes) {
    record("stubCopy nbytes=" + std::to_string(nbytes));
    stream->give([=] { std::memmove(target, source, nbytes); });
}
}
