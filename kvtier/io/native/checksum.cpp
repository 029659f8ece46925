#include "checksum.h"

#include <cstring>

#if defined(__x86_64__)
#include <cpuid.h>
#include <immintrin.h>
#endif

static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "slabs are sums of little-endian words");

namespace kvtier {
namespace {

constexpr uint32_t kMixA = 0x7FEB352Du, kMixB = 0x846CA68Bu, kGolden32 = 0x9E3779B9u;
constexpr uint64_t kGolden64 = 0x9E3779B97F4A7C15ull;

uint64_t mix64(uint64_t x) {
  x ^= x >> 30;
  x *= 0xBF58476D1CE4E5B9ull;
  x ^= x >> 27;
  x *= 0x94D049BB133111EBull;
  return x ^ (x >> 31);
}

uint64_t sum_scalar(const uint8_t* data, size_t bytes, uint64_t seed, uint64_t first_pair) {
  const uint32_t low = static_cast<uint32_t>(seed), high = static_cast<uint32_t>(seed >> 32);
  const uint32_t start = static_cast<uint32_t>(first_pair) + low;
  uint64_t sum = 0;
  for (size_t i = 0; i < bytes / 8; i++) {
    uint32_t words[2];
    std::memcpy(words, data + 8 * i, 8);
    uint32_t k0 = start + static_cast<uint32_t>(i);
    k0 ^= k0 >> 16;
    k0 *= kMixA;
    k0 ^= k0 >> 15;
    k0 *= kMixB;
    k0 ^= k0 >> 16;
    uint32_t k1 = (k0 ^ high) * kGolden32;
    k1 ^= k1 >> 15;
    sum += static_cast<uint64_t>(words[0] + k0) * static_cast<uint64_t>(words[1] + k1);
  }
  return sum;
}

#if defined(__x86_64__)

// Both vector versions make the keys of a whole run of pairs at once, in 32-bit lanes; even lanes of the counter hold
// the pairs of the first half of the run, odd lanes those of the second half. A product needs its two factors in the
// low halves of 64-bit lanes. In the first half k0 and k1 are there already, and only the data's odd words are moved
// down; in the second half k0 is moved down to the even words, and the sum with the odd words after the addition.
// (Three shifts for two products. Interleaving k0 and k1 takes four shuffles: 58 against 62 GB/s on a Zen 5 core.)

__attribute__((target("avx2"))) uint64_t sum_avx2(const uint8_t* data, size_t bytes, uint64_t seed,
                                                  uint64_t first_pair) {
  constexpr size_t kRun = 64;  // bytes: 8 pairs
  const __m256i high = _mm256_set1_epi32(static_cast<int>(seed >> 32));
  const __m256i a = _mm256_set1_epi32(static_cast<int>(kMixA)), b = _mm256_set1_epi32(static_cast<int>(kMixB));
  const __m256i golden = _mm256_set1_epi32(static_cast<int>(kGolden32));
  const __m256i step = _mm256_set1_epi32(8);
  __m256i x = _mm256_add_epi32(_mm256_set1_epi32(static_cast<int>(static_cast<uint32_t>(first_pair + seed))),
                               _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7));
  __m256i sum0 = _mm256_setzero_si256(), sum1 = _mm256_setzero_si256();
  const size_t runs = bytes / kRun;
  for (size_t r = 0; r < runs; r++) {
    __m256i k0 = _mm256_mullo_epi32(_mm256_xor_si256(x, _mm256_srli_epi32(x, 16)), a);
    k0 = _mm256_mullo_epi32(_mm256_xor_si256(k0, _mm256_srli_epi32(k0, 15)), b);
    k0 = _mm256_xor_si256(k0, _mm256_srli_epi32(k0, 16));
    __m256i k1 = _mm256_mullo_epi32(_mm256_xor_si256(k0, high), golden);
    k1 = _mm256_xor_si256(k1, _mm256_srli_epi32(k1, 15));
    const __m256i* source = reinterpret_cast<const __m256i*>(data + kRun * r);
    const __m256i w0 = _mm256_loadu_si256(source), w1 = _mm256_loadu_si256(source + 1);
    sum0 = _mm256_add_epi64(sum0, _mm256_mul_epu32(_mm256_add_epi32(w0, k0),
                                                   _mm256_add_epi32(_mm256_srli_epi64(w0, 32), k1)));
    sum1 = _mm256_add_epi64(sum1, _mm256_mul_epu32(_mm256_add_epi32(w1, _mm256_srli_epi64(k0, 32)),
                                                   _mm256_srli_epi64(_mm256_add_epi32(w1, k1), 32)));
    x = _mm256_add_epi32(x, step);
  }
  alignas(32) uint64_t lanes[4];
  _mm256_store_si256(reinterpret_cast<__m256i*>(lanes), _mm256_add_epi64(sum0, sum1));
  const size_t done = runs * kRun;
  return lanes[0] + lanes[1] + lanes[2] + lanes[3] + sum_scalar(data + done, bytes - done, seed, first_pair + done / 8);
}

__attribute__((target("avx512f"))) uint64_t sum_avx512(const uint8_t* data, size_t bytes, uint64_t seed,
                                                       uint64_t first_pair) {
  constexpr size_t kRun = 128;  // bytes: 16 pairs
  constexpr int kXor3 = 0x96;
  const __m512i high = _mm512_set1_epi32(static_cast<int>(seed >> 32));
  const __m512i a = _mm512_set1_epi32(static_cast<int>(kMixA)), b = _mm512_set1_epi32(static_cast<int>(kMixB));
  const __m512i golden = _mm512_set1_epi32(static_cast<int>(kGolden32));
  const __m512i step = _mm512_set1_epi32(16);
  __m512i x = _mm512_add_epi32(_mm512_set1_epi32(static_cast<int>(static_cast<uint32_t>(first_pair + seed))),
                               _mm512_setr_epi32(0, 8, 1, 9, 2, 10, 3, 11, 4, 12, 5, 13, 6, 14, 7, 15));
  __m512i sum0 = _mm512_setzero_si512(), sum1 = _mm512_setzero_si512();
  const size_t runs = bytes / kRun;
  for (size_t r = 0; r < runs; r++) {
    __m512i k0 = _mm512_mullo_epi32(_mm512_xor_si512(x, _mm512_srli_epi32(x, 16)), a);
    k0 = _mm512_mullo_epi32(_mm512_xor_si512(k0, _mm512_srli_epi32(k0, 15)), b);
    const __m512i shifted = _mm512_srli_epi32(k0, 16);
    __m512i k1 = _mm512_mullo_epi32(_mm512_ternarylogic_epi32(k0, shifted, high, kXor3), golden);
    k0 = _mm512_xor_si512(k0, shifted);
    k1 = _mm512_xor_si512(k1, _mm512_srli_epi32(k1, 15));
    const uint8_t* source = data + kRun * r;
    const __m512i w0 = _mm512_loadu_si512(source), w1 = _mm512_loadu_si512(source + 64);
    sum0 = _mm512_add_epi64(sum0, _mm512_mul_epu32(_mm512_add_epi32(w0, k0),
                                                   _mm512_add_epi32(_mm512_srli_epi64(w0, 32), k1)));
    sum1 = _mm512_add_epi64(sum1, _mm512_mul_epu32(_mm512_add_epi32(w1, _mm512_srli_epi64(k0, 32)),
                                                   _mm512_srli_epi64(_mm512_add_epi32(w1, k1), 32)));
    x = _mm512_add_epi32(x, step);
  }
  alignas(64) uint64_t lanes[8];
  _mm512_store_si512(lanes, _mm512_add_epi64(sum0, sum1));
  uint64_t sum = 0;
  for (uint64_t lane : lanes) sum += lane;
  const size_t done = runs * kRun;
  return sum + sum_scalar(data + done, bytes - done, seed, first_pair + done / 8);
}

// The processor's and the operating system's word, read by hand: __builtin_cpu_supports needs a runtime library that
// not every compiler driver (zig's, for one) links into a shared object.
void detect(bool* avx2, bool* avx512) {
  unsigned eax, ebx, ecx, edx;
  *avx2 = *avx512 = false;
  if (!__get_cpuid(1, &eax, &ebx, &ecx, &edx) || !(ecx & (1u << 27))) return;  // OSXSAVE
  unsigned state, state_high;
  __asm__("xgetbv" : "=a"(state), "=d"(state_high) : "c"(0));
  if (!__get_cpuid_count(7, 0, &eax, &ebx, &ecx, &edx)) return;
  *avx2 = (state & 0x06) == 0x06 && (ebx & (1u << 5));
  *avx512 = (state & 0xE6) == 0xE6 && (ebx & (1u << 16));
}

#else

constexpr SumFunction sum_avx2 = nullptr, sum_avx512 = nullptr;

void detect(bool* avx2, bool* avx512) { *avx2 = *avx512 = false; }

#endif

struct Table {
  InstructionSet sets[kInstructionSets];
  Table() {
    bool avx2, avx512;
    detect(&avx2, &avx512);
    sets[0] = {"scalar", sum_scalar, true};
    sets[1] = {"avx2", sum_avx2, avx2};
    sets[2] = {"avx512", sum_avx512, avx512};
  }
};

}  // namespace

const InstructionSet* instruction_sets() {
  static const Table table;
  return table.sets;
}

const InstructionSet& best_instruction_set() {
  const InstructionSet* sets = instruction_sets();
  int best = kInstructionSets - 1;
  while (!sets[best].usable) best--;
  return sets[best];
}

uint64_t slab_seed(const uint8_t key[16], uint32_t head, uint32_t first_layer) {
  uint64_t low, high;
  std::memcpy(&low, key, 8);
  std::memcpy(&high, key + 8, 8);
  const uint64_t inner = mix64(low + kGolden64 * (uint64_t{head} + 1));
  return mix64(inner ^ high ^ (kGolden64 * (uint64_t{first_layer} + 1)));
}

}  // namespace kvtier
