// Seeded slab checksum: NH over a mixed-counter key stream, as defined in kvtier/format/checksum.py.
#pragma once
#include <cstddef>
#include <cstdint>

namespace kvtier {

// Sums `bytes` (a multiple of 8) of a slab; `first_pair` is the index of the first 8-byte pair within the slab.
// Summands of disjoint pieces add up (mod 2^64) to the checksum of the slab.
using SumFunction = uint64_t (*)(const uint8_t* data, size_t bytes, uint64_t seed, uint64_t first_pair);

struct InstructionSet {
  const char* name;
  SumFunction sum;  // null where the compiler's target has no such instructions
  bool usable;  // this processor and operating system run it
};

constexpr int kInstructionSets = 3;

// Slowest first. The table is made on the first call; threads may race for it.
const InstructionSet* instruction_sets();

// The fastest usable version.
const InstructionSet& best_instruction_set();

uint64_t slab_seed(const uint8_t key[16], uint32_t head, uint32_t first_layer);

}  // namespace kvtier
