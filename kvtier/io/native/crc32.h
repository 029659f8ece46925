// CRC-32 with zlib's polynomial, for header pages.
#pragma once
#include <cstddef>
#include <cstdint>

namespace kvtier {

// What zlib.crc32(data) gives.
uint32_t crc32(const uint8_t* data, size_t bytes);

}  // namespace kvtier
