// The double of CUDA's driver, and records that are read for its device: what the native tests over it share.
#pragma once
#include <dlfcn.h>

#include "native_support.h"

constexpr uint64_t kSlabsBytes = kSlabs * kSlab;

struct Double {
  int64_t (*outstanding)();
  int64_t (*faults)();
  void (*delay)(int64_t);
  void (*fail)(const char*, int64_t, int64_t, int);

  explicit Double(const std::string& path) {
    void* library = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
    CHECK(library != nullptr);
    outstanding = reinterpret_cast<int64_t (*)()>(dlsym(library, "fake_outstanding"));
    faults = reinterpret_cast<int64_t (*)()>(dlsym(library, "fake_faults"));
    delay = reinterpret_cast<void (*)(int64_t)>(dlsym(library, "fake_delay"));
    fail = reinterpret_cast<void (*)(const char*, int64_t, int64_t, int)>(dlsym(library, "fake_fail"));
    CHECK(outstanding && faults && delay && fail);
  }
  void check_clean() const { CHECK(outstanding() == 0 && faults() == 0); }
};

inline OpSpec device_record(int fd, uint64_t number, uint8_t* address) {
  OpSpec spec = record(kRead, fd, number, address);
  spec.flags = kOnDevice;
  return spec;
}

// Makes a file one of `n` records, each full of bytes of its own; gives it back.
inline int records(int fd, uint64_t n) {
  std::vector<uint8_t> slabs(kSlabsBytes);
  for (uint64_t number = 0; number < n; number++) {
    for (size_t i = 0; i < slabs.size(); i++) slabs[i] = static_cast<uint8_t>(i / kPageBytes * 7 + number);
    CHECK(pwrite(fd, slabs.data(), slabs.size(), static_cast<off_t>(number * kRecord + kPageBytes)) ==
          static_cast<ssize_t>(slabs.size()));
  }
  return fd;
}

inline bool landed(const uint8_t* slabs, uint64_t number) {
  for (size_t i = 0; i < kSlabsBytes; i++)
    if (slabs[i] != static_cast<uint8_t>(i / kPageBytes * 7 + number)) return false;
  return true;
}
