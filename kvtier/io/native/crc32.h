// CRC-32 with zlib's polynomial, for header pages.
#pragma once
#include <cstddef>
#include <cstdint>

namespace kvtier {

// Equals zlib.crc32(data).
uint32_t crc32(const uint8_t* data, size_t bytes);

}  // namespace kvtier
