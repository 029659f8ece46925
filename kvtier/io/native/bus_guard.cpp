#include "bus_guard.h"

#include <signal.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <mutex>

namespace kvtier {
namespace {

std::atomic<BusGuard::Place*> places{nullptr};
std::atomic<uint64_t> n_ended_early{0};
struct sigaction before;  // what was there; set before the handler is

pid_t this_thread() { return static_cast<pid_t>(syscall(SYS_gettid)); }

void on_bus_error(int signal, siginfo_t* info, void*) {
  const bool is_of_an_instruction = info->si_code > 0;
  if (is_of_an_instruction) {
    const pid_t thread = this_thread();
    const auto address = reinterpret_cast<uintptr_t>(info->si_addr);
    for (BusGuard::Place* place = places.load(std::memory_order_acquire); place != nullptr; place = place->next) {
      if (place->thread.load(std::memory_order_relaxed) != thread) continue;
      if (address < place->begin.load(std::memory_order_relaxed)) continue;
      if (address >= place->end.load(std::memory_order_relaxed)) continue;
      place->unwatch();
      n_ended_early.fetch_add(1, std::memory_order_relaxed);
      place->error = info->si_code == BUS_ADRERR ? ENODATA : EIO;
      // It is blocked while its handler runs, which does not return; to save the mask with each copy is a system call.
      sigset_t bus_error;
      sigemptyset(&bus_error);
      sigaddset(&bus_error, SIGBUS);
      pthread_sigmask(SIG_UNBLOCK, &bus_error, nullptr);
      siglongjmp(place->back, 1);
    }
  }
  sigaction(SIGBUS, &before, nullptr);
  if (!is_of_an_instruction) syscall(SYS_tgkill, getpid(), this_thread(), signal);
}

}  // namespace

bool catch_bus_errors() {
  static std::once_flag once;
  std::call_once(once, [] {
    sigaction(SIGBUS, nullptr, &before);
    struct sigaction ours {};
    ours.sa_sigaction = on_bus_error;
    sigemptyset(&ours.sa_mask);
    ours.sa_flags = SA_SIGINFO | SA_ONSTACK | SA_RESTART;
    sigaction(SIGBUS, &ours, nullptr);
  });
  return are_bus_errors_caught();
}

bool are_bus_errors_caught() {
  struct sigaction now {};
  return sigaction(SIGBUS, nullptr, &now) == 0 && (now.sa_flags & SA_SIGINFO) != 0 && now.sa_sigaction == on_bus_error;
}

uint64_t copies_ended_early() { return n_ended_early.load(std::memory_order_relaxed); }

BusGuard::BusGuard() {
  const pid_t thread = this_thread();
  for (place_ = places.load(std::memory_order_acquire); place_ != nullptr; place_ = place_->next) {
    pid_t nobody = 0;
    if (place_->thread.compare_exchange_strong(nobody, thread)) return;
  }
  place_ = new Place;
  place_->thread.store(thread, std::memory_order_relaxed);
  place_->next = places.load(std::memory_order_relaxed);
  while (!places.compare_exchange_weak(place_->next, place_, std::memory_order_release, std::memory_order_relaxed)) {
  }
}

BusGuard::~BusGuard() { place_->thread.store(0, std::memory_order_release); }

}  // namespace kvtier
