// Settings of the library's own threads.
#pragma once
#include <pthread.h>
#include <signal.h>

namespace kvtier {

inline void become_worker() {
  sigset_t all;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, nullptr);  // the application's own threads handle signals
  pthread_setname_np(pthread_self(), "kvtier-io");
}

}  // namespace kvtier
