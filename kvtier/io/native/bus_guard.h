// Copies out of mapped files. Where the file has been cut meanwhile, or its memory is broken, such a copy meets SIGBUS,
// which ends the process by default; here it ends the copy.
#pragma once
#include <setjmp.h>
#include <sys/types.h>

#include <atomic>
#include <cerrno>
#include <cstddef>
#include <cstdint>

namespace kvtier {

// Installs the handler, once in a process: whoever replaces it later may lead on to it, and then a second one would be
// led to itself. True when it is in place.
//
// What hits no guarded copy goes to whatever was there before, by its own rules: that is put back, and the instruction
// (or, where another process sent it, the signal) is repeated. So a crash leaves the trace or the core that it would
// have left without us, and a process that survives it reads its files the ordinary way from then on.
bool catch_bus_errors();

// Whether the handler is (still) in place: one system call.
bool are_bus_errors_caught();

// Copies that ended so, in this process.
uint64_t copies_ended_early();

// One thread's copies. Made, used and destroyed on that thread, which must not block SIGBUS.
class BusGuard {
 public:
  BusGuard();
  ~BusGuard();
  BusGuard(const BusGuard&) = delete;
  BusGuard& operator=(const BusGuard&) = delete;

  // Runs copy(), which reads `bytes` from `source` on, allocates nothing and takes no lock: it may end anywhere.
  // 0, or why not all was copied: ENODATA, the file ends before; EIO, its memory is broken.
  template <typename Copy>
  int run(const uint8_t* source, size_t bytes, Copy copy) {
    if (sigsetjmp(place_->back, 0) != 0) return place_->error;
    place_->watch(reinterpret_cast<uintptr_t>(source), bytes);
    copy();
    place_->unwatch();
    return 0;
  }

  // What the handler sees of it, from a list that only grows: a place is used again, never freed. (Not a thread-local
  // variable, for in a library that was loaded later the first look at one of those may allocate.)
  struct Place {
    std::atomic<pid_t> thread{0};  // 0: free
    std::atomic<uintptr_t> begin{0}, end{0};
    int error = 0;
    sigjmp_buf back;
    Place* next = nullptr;

    void watch(uintptr_t source, size_t bytes) {
      begin.store(source, std::memory_order_relaxed);
      end.store(source + bytes, std::memory_order_relaxed);
      std::atomic_signal_fence(std::memory_order_seq_cst);
    }
    void unwatch() {
      std::atomic_signal_fence(std::memory_order_seq_cst);
      end.store(0, std::memory_order_relaxed);
    }
  };

 private:
  Place* place_;
};

}  // namespace kvtier
