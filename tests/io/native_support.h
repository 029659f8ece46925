// What the native tests share.
#pragma once
#include <fcntl.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

#include "engine.h"

#define CHECK(condition)                                                      \
  do {                                                                        \
    if (!(condition)) {                                                       \
      std::fprintf(stderr, "%s:%d: %s\n", __FILE__, __LINE__, #condition);    \
      std::abort();                                                           \
    }                                                                         \
  } while (0)

using namespace kvtier;
using namespace std::chrono_literals;

constexpr uint64_t kPiece = 16 * kPageBytes;
constexpr uint64_t kSlab = 10 * kPageBytes;
constexpr uint32_t kSlabs = 5;
constexpr uint64_t kRecord = kPageBytes + kSlabs * kSlab;

inline std::string folder;

// Pages of memory that go away with their owner, so that a late access is seen.
struct Pages {
  explicit Pages(size_t n_bytes) : data(static_cast<uint8_t*>(std::aligned_alloc(kPageBytes, n_bytes))) {
    std::memset(data, 0x5A, n_bytes);
  }
  ~Pages() { std::free(data); }
  Pages(const Pages&) = delete;
  uint8_t* data;
};

inline OpSpec record(Kind kind, int fd, uint64_t number, uint8_t* address) {
  OpSpec spec{};
  spec.kind = kind;
  spec.fd = fd;
  spec.offset = static_cast<int64_t>(number * kRecord + (kind == kRead ? kPageBytes : 0));
  spec.address = reinterpret_cast<uint64_t>(address);
  spec.slab_bytes = kSlab;
  spec.n_slabs = kSlabs;
  spec.first_head = 2;
  spec.flags = kind == kRead ? kVerify : 0;
  std::memset(spec.key, static_cast<int>(number), 16);
  return spec;
}

inline std::shared_ptr<Batch> submitted(Engine& engine, const std::vector<OpSpec>& specs,
                                        const std::vector<uint64_t>& expected = {}) {
  std::vector<uint64_t> sums = expected;
  sums.resize(specs.size() * kSlabsMax);
  auto batch = std::make_shared<Batch>(specs.data(), specs.size(), sums.data());
  CHECK(engine.submit(batch) == 0);
  return batch;
}

inline int file(const std::string& name) {
  const int fd = open((folder + "/" + name).c_str(), O_RDWR | O_CREAT | O_TRUNC, 0600);
  CHECK(fd >= 0);
  return fd;
}

// In native_neighbours_test.cpp.
void neighbours_are_read_together();
void neighbours_race(Engine& engine, uint32_t flags);

// In native_device_test.cpp; `driver`: the double of CUDA's driver.
void device_stage_is_clean(const std::string& driver);

// In native_ranges_test.cpp.
void range_reads_are_clean(const std::string& driver);
