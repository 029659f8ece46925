// Launch of a kernel together with its table, in one call.
#pragma once
#include "cuda_driver.h"

namespace kvtier {

constexpr uint32_t kArgumentsMax = 24;  // the driver reads as many as the kernel declares

// kvtier/io/cuda.py packs this struct.
struct LaunchSpec {
  CuStream stream;
  CuEvent event;  // recorded after all operations; null: none is
  void* function;
  const void* table;  // pinned, copied to table_target first
  uint64_t table_target, table_bytes;
  void* answer;  // pinned; answer_source is copied to it last. 0 bytes: there is none
  uint64_t answer_source, answer_bytes;
  uint32_t grid[3];  // with a 0 in it, no kernel is launched
  uint32_t threads, shared_bytes, unused;
  uint64_t arguments[kArgumentsMax];
};

// In the context that is current on this thread; waits for nothing. Throws CudaFailed: part of it may be under way.
void launch(const LaunchSpec& spec);

}  // namespace kvtier
