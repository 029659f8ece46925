#include "checksum.h"

#include <array>
#include <cstring>

#if defined(__x86_64__)
#include <cpuid.h>
#include <immintrin.h>
#endif

static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "slabs are sums of little-endian words");

namespace kvtier {
namespace {

constexpr uint32_t kMixA = 0x7FEB352Du, kMixB = 0x846CA68Bu, kGolden32 = 0x9E3779B9u;
constexpr uint32_t kPagePairs = 512;  // 4096 bytes
constexpr uint64_t kGolden64 = 0x9E3779B97F4A7C15ull;

uint64_t mix64(uint64_t x) {
  x ^= x >> 30;
  x *= 0xBF58476D1CE4E5B9ull;
  x ^= x >> 27;
  x *= 0x94D049BB133111EBull;
  return x ^ (x >> 31);
}

inline uint32_t mix32(uint32_t x) {
  x ^= x >> 16;
  x *= kMixA;
  x ^= x >> 15;
  x *= kMixB;
  return x ^ (x >> 16);
}

inline uint32_t fold(uint32_t x) {
  x *= kGolden32;
  return x ^ (x >> 15);
}

// Keys have k0 in the low half and k1 in the high half, as a pair of words is stored in memory. The key of a pair is
// key_in_page xor key_of_page.
inline uint64_t key_in_page(uint32_t pair, uint64_t seed) {
  const uint32_t a0 = mix32(pair + static_cast<uint32_t>(seed));
  return a0 | static_cast<uint64_t>(fold(a0 ^ static_cast<uint32_t>(seed >> 32))) << 32;
}

uint64_t key_of_page(uint64_t page, uint64_t seed) {
  const uint32_t p0 = mix32(static_cast<uint32_t>(page) * kGolden32 + static_cast<uint32_t>(seed >> 32));
  return p0 | static_cast<uint64_t>(fold(p0 ^ static_cast<uint32_t>(seed))) << 32;
}

inline uint64_t product(const uint8_t* data, uint64_t key) {
  uint32_t words[2];
  std::memcpy(words, data, 8);
  return static_cast<uint64_t>(words[0] + static_cast<uint32_t>(key)) *
         static_cast<uint64_t>(words[1] + static_cast<uint32_t>(key >> 32));
}

// Sums less than a page, computing the key of each pair.
uint64_t sum_pairs(const uint8_t* data, uint64_t pairs, uint64_t seed, uint64_t first_pair) {
  uint64_t sum = 0;
  for (uint64_t i = first_pair; i < first_pair + pairs; i++, data += 8)
    sum += product(data, key_in_page(static_cast<uint32_t>(i % kPagePairs), seed) ^ key_of_page(i / kPagePairs, seed));
  return sum;
}

// Computes the keys within a page. Inlined, to be compiled with the instructions of the calling version.
inline __attribute__((always_inline)) void fill_table(uint64_t* table, uint64_t seed) {
  for (uint32_t l = 0; l < kPagePairs; l++) table[l] = key_in_page(l, seed);
}

// Sums whole pages.
using PagesFunction = uint64_t (*)(const uint8_t* data, size_t pages, uint64_t seed, uint64_t first_page);

// Sums whole pages by `kPages`, and the pairs before and after them one by one.
template <PagesFunction kPages>
uint64_t sum_with(const uint8_t* data, size_t bytes, uint64_t seed, uint64_t first_pair) {
  const uint64_t pairs = bytes / 8;
  uint64_t head = (kPagePairs - first_pair % kPagePairs) % kPagePairs;
  if (head > pairs) head = pairs;
  const uint64_t pages = (pairs - head) / kPagePairs, tail = pairs - head - pages * kPagePairs;
  const uint64_t sum =
      pages != 0 ? kPages(data + head * 8, pages, seed, (first_pair + head) / kPagePairs) : 0;
  return sum + sum_pairs(data, head, seed, first_pair) +
         sum_pairs(data + (pairs - tail) * 8, tail, seed, first_pair + pairs - tail);
}

uint64_t pages_scalar(const uint8_t* data, size_t pages, uint64_t seed, uint64_t first_page) {
  alignas(64) uint64_t table[kPagePairs];
  fill_table(table, seed);
  uint64_t sum = 0;
  for (size_t j = 0; j < pages; j++, data += 8 * kPagePairs) {
    const uint64_t page_key = key_of_page(first_page + j, seed);
    for (uint32_t l = 0; l < kPagePairs; l++) sum += product(data + 8 * l, table[l] ^ page_key);
  }
  return sum;
}

#if defined(__x86_64__)

__attribute__((target("avx2"))) uint64_t pages_avx2(const uint8_t* data, size_t pages, uint64_t seed,
                                                    uint64_t first_page) {
  alignas(64) uint64_t table[kPagePairs];
  fill_table(table, seed);
  constexpr int kLanes = 4, kWays = 4;  // independent sums hide the product's latency
  __m256i sums[kWays] = {};
  for (size_t j = 0; j < pages; j++) {
    const __m256i page_key = _mm256_set1_epi64x(static_cast<long long>(key_of_page(first_page + j, seed)));
    for (uint32_t l = 0; l < kPagePairs; l += kLanes * kWays, data += 8 * kLanes * kWays) {
      for (int way = 0; way < kWays; way++) {
        const __m256i words = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(data) + way);
        const __m256i keys = _mm256_load_si256(reinterpret_cast<const __m256i*>(table + l) + way);
        const __m256i both = _mm256_add_epi32(words, _mm256_xor_si256(keys, page_key));
        sums[way] = _mm256_add_epi64(sums[way], _mm256_mul_epu32(both, _mm256_srli_epi64(both, 32)));
      }
    }
  }
  alignas(32) uint64_t lanes[kLanes];
  _mm256_store_si256(reinterpret_cast<__m256i*>(lanes),
                     _mm256_add_epi64(_mm256_add_epi64(sums[0], sums[1]), _mm256_add_epi64(sums[2], sums[3])));
  return lanes[0] + lanes[1] + lanes[2] + lanes[3];
}

__attribute__((target("avx512f"))) uint64_t pages_avx512(const uint8_t* data, size_t pages, uint64_t seed,
                                                         uint64_t first_page) {
  alignas(64) uint64_t table[kPagePairs];
  fill_table(table, seed);
  constexpr int kLanes = 8, kWays = 4;
  __m512i sums[kWays] = {};
  for (size_t j = 0; j < pages; j++) {
    const __m512i page_key = _mm512_set1_epi64(static_cast<long long>(key_of_page(first_page + j, seed)));
    for (uint32_t l = 0; l < kPagePairs; l += kLanes * kWays, data += 8 * kLanes * kWays) {
      for (int way = 0; way < kWays; way++) {
        const __m512i words = _mm512_loadu_si512(data + 64 * way);
        const __m512i keys = _mm512_load_si512(table + l + kLanes * way);
        const __m512i both = _mm512_add_epi32(words, _mm512_xor_si512(keys, page_key));
        sums[way] = _mm512_add_epi64(sums[way], _mm512_mul_epu32(both, _mm512_srli_epi64(both, 32)));
      }
    }
  }
  alignas(64) uint64_t lanes[kLanes];
  _mm512_store_si512(lanes, _mm512_add_epi64(_mm512_add_epi64(sums[0], sums[1]), _mm512_add_epi64(sums[2], sums[3])));
  uint64_t sum = 0;
  for (uint64_t lane : lanes) sum += lane;
  return sum;
}

// Reads support by processor and operating system with cpuid: __builtin_cpu_supports needs a runtime library that not
// every compiler driver (such as zig's) links into a shared object.
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

#endif

struct Table {
  InstructionSet sets[kInstructionSets] = {
      {"scalar", sum_with<pages_scalar>, true}, {"avx2", nullptr, false}, {"avx512", nullptr, false}};
#if defined(__x86_64__)
  Table() {
    sets[1].sum = sum_with<pages_avx2>;
    sets[2].sum = sum_with<pages_avx512>;
    detect(&sets[1].usable, &sets[2].usable);
  }
#endif
};

// Eight tables for eight bytes a step (Intel's "slicing by 8").
using Tables = std::array<std::array<uint32_t, 256>, 8>;

constexpr Tables make_tables() {
  Tables tables{};
  for (uint32_t byte = 0; byte < 256; byte++) {
    uint32_t crc = byte;
    for (int bit = 0; bit < 8; bit++) crc = (crc >> 1) ^ ((crc & 1) ? 0xEDB88320u : 0u);
    tables[0][byte] = crc;
  }
  for (uint32_t byte = 0; byte < 256; byte++)
    for (size_t t = 1; t < 8; t++)
      tables[t][byte] = (tables[t - 1][byte] >> 8) ^ tables[0][tables[t - 1][byte] & 0xFF];
  return tables;
}

constexpr Tables kTables = make_tables();

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

uint32_t crc32(const uint8_t* data, size_t bytes) {
  uint32_t crc = 0xFFFFFFFFu;
  for (; bytes >= 8; bytes -= 8, data += 8) {
    uint32_t low, high;
    std::memcpy(&low, data, 4);
    std::memcpy(&high, data + 4, 4);
    low ^= crc;
    crc = kTables[7][low & 0xFF] ^ kTables[6][(low >> 8) & 0xFF] ^ kTables[5][(low >> 16) & 0xFF] ^
          kTables[4][low >> 24] ^ kTables[3][high & 0xFF] ^ kTables[2][(high >> 8) & 0xFF] ^
          kTables[1][(high >> 16) & 0xFF] ^ kTables[0][high >> 24];
  }
  for (; bytes > 0; bytes--, data++) crc = (crc >> 8) ^ kTables[0][(crc ^ *data) & 0xFF];
  return ~crc;
}

}  // namespace kvtier
