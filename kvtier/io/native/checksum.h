// Seeded slab checksum: NH over a mixed-counter key stream, as defined in kvtier/format/checksum.py; CRC-32 of header
// pages.
#pragma once
#include <cstddef>
#include <cstdint>

namespace kvtier {

// Sums `bytes` (a multiple of 8) of a slab; `first_pair`: index of the first 8-byte pair within the slab. The sums of
// disjoint pieces add up (mod 2^64) to the checksum of the slab.
using SumFunction = uint64_t (*)(const uint8_t* data, size_t bytes, uint64_t seed, uint64_t first_pair);

struct InstructionSet {
  const char* name;
  SumFunction sum;  // null if the compiler's target has no such instructions
  bool usable;      // by this processor and operating system
};

constexpr int kInstructionSets = 3;

// Slowest first. The table is built on the first call, thread-safe.
const InstructionSet* instruction_sets();

// The fastest usable version.
const InstructionSet& best_instruction_set();

uint64_t slab_seed(const uint8_t key[16], uint32_t head, uint32_t first_layer);

uint32_t crc32(const uint8_t* data, size_t bytes);  // as zlib.crc32

}  // namespace kvtier
