// One connection to a store's server: a request, then its answer. Thread-safe.
#pragma once

#include <array>
#include <chrono>
#include <functional>
#include <mutex>

#include "store/message.hpp"

namespace paceline::store {

class Client {
  public:
    // Takes over `fd`, a connected and authenticated stream socket.
    explicit Client(int fd);
    Client(const Client&) = delete;
    Client& operator=(const Client&) = delete;
    ~Client();

    enum class Result { answered, closed, timed_out, interrupted };

    // `interrupted` is asked now and then while the answer is awaited. After anything but `answered` the connection
    // is closed: the answer to this request could be taken for the next one's.
    Result ask(const Message& request, Message& answer, std::chrono::steady_clock::time_point deadline,
               const std::function<bool()>& interrupted);
    void close();

  private:
    Result wait_for(short events, std::chrono::steady_clock::time_point deadline,
                    const std::function<bool()>& interrupted);
    Result exchange(const Message& request, Message& answer, std::chrono::steady_clock::time_point deadline,
                    const std::function<bool()>& interrupted);

    std::mutex mutex_;
    int fd_;
    std::string out_, in_;
    std::array<char, 16 << 10> buffer_;
};

}  // namespace paceline::store
