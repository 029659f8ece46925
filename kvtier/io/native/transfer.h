// Whole reads and writes at an offset: errno values, never exceptions.
#pragma once
#include <cstddef>
#include <cstdint>

namespace kvtier {

// 0 when all bytes landed, ENODATA when the file ends before them, else errno.
int read_fully(int fd, uint8_t* target, size_t bytes, int64_t offset);

// 0 when all bytes were taken, else errno.
int write_fully(int fd, const uint8_t* source, size_t bytes, int64_t offset);

}  // namespace kvtier
