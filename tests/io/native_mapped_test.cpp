// Reads from mapped files, which others cut, unlink and leave holes in; and SIGBUS, which may be somebody else's.
#include <signal.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/wait.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <fstream>
#include <thread>

#include "bus_guard.h"
#include "mapped.h"
#include "native_support.h"
#include "transfer.h"

namespace {

constexpr uint64_t kRecords = 4;

std::string in_memory;  // a folder of a tmpfs

int memory_file(const std::string& name) {
  const int fd = open((in_memory + "/" + name).c_str(), O_RDWR | O_CREAT | O_TRUNC, 0600);
  CHECK(fd >= 0);
  return fd;
}

std::shared_ptr<Engine> mapping_engine(uint32_t threads) {
  EngineOptions options{threads, 1024, kPiece, kPiece};
  options.map_reads = 1;
  return Engine::start(options);
}

uint8_t byte_at(uint64_t i, uint8_t salt) { return static_cast<uint8_t>(i / 64 * 7 + i / kRecord + salt); }

void fill(int fd, uint64_t bytes, uint8_t salt = 1) {
  std::vector<uint8_t> data(bytes);
  for (uint64_t i = 0; i < bytes; i++) data[i] = byte_at(i, salt);
  CHECK(pwrite(fd, data.data(), bytes, 0) == static_cast<ssize_t>(bytes));
}

bool landed(const uint8_t* memory, uint64_t number, uint8_t salt = 1) {
  for (uint64_t i = 0; i < kSlabs * kSlab; i++)
    if (memory[i] != byte_at(number * kRecord + kPageBytes + i, salt)) return false;
  return true;
}

// How many mappings this process has of files of this name, also of removed ones; with a star, that begin with it.
int mapped(const std::string& name) {
  const bool is_prefix = name.back() == '*';
  const std::string path = in_memory + "/" + (is_prefix ? name.substr(0, name.size() - 1) : name);
  std::ifstream maps("/proc/self/maps");
  int found = 0;
  for (std::string line; std::getline(maps, line);) {
    const size_t at = line.find(path);
    if (at == std::string::npos) continue;
    const std::string rest = line.substr(at + path.size());
    found += is_prefix || rest.empty() || rest[0] == ' ';
  }
  return found;
}

bool unmapped_soon(const std::string& name) {
  for (int i = 0; i < 2000 && mapped(name) > 0; i++) std::this_thread::sleep_for(5ms);
  return mapped(name) == 0;
}

int error_of_read(Engine& engine, int fd, uint64_t number, uint8_t* memory) {
  auto batch = submitted(engine, {record(kRead, fd, number, memory)});
  CHECK(batch->wait(20s));
  return batch->op(0).error;
}

void the_kernel_is_not_asked_to_read() {
  auto engine = mapping_engine(3);
  const int fd = memory_file("read");
  fill(fd, kRecords * kRecord);
  Pages plain(kSlabs * kSlab), memory(kSlabs * kSlab);
  auto in_place = Engine::start({1, 1024, kPiece, kPiece});
  for (uint64_t number = 0; number < kRecords; number++) {
    auto expected = submitted(*in_place, {record(kRead, fd, number, plain.data)});
    CHECK(expected->wait(20s));
    const uint64_t before = reads_issued();
    auto batch = submitted(*engine, {record(kRead, fd, number, memory.data)});
    CHECK(batch->wait(20s) && batch->op(0).error == 0 && landed(memory.data, number));
    CHECK(reads_issued() == before);
    for (uint32_t slab = 0; slab < kSlabs; slab++) CHECK(batch->sum(slab) == expected->sum(slab));
  }
  CHECK(mapped("read") == 1);
  CHECK(in_place->close(5s) && engine->close(5s));
  CHECK(mapped("read") == 0);
  ::close(fd);
}

// Read, as it is, without giving it memory.
void holes_are_left_to_the_kernel() {
  auto engine = mapping_engine(2);
  const int fd = memory_file("hole");
  fill(fd, kRecord + kPageBytes + kSlab);  // one slab of the second record
  CHECK(ftruncate(fd, static_cast<off_t>(2 * kRecord)) == 0);
  struct stat before, after;
  CHECK(fstat(fd, &before) == 0);
  Pages memory(kSlabs * kSlab);
  const uint64_t reads = reads_issued();
  CHECK(error_of_read(*engine, fd, 0, memory.data) == 0 && landed(memory.data, 0) && reads_issued() == reads);
  CHECK(error_of_read(*engine, fd, 1, memory.data) == 0 && reads_issued() > reads);
  for (uint64_t i = 0; i < kSlabs * kSlab; i++)
    CHECK(memory.data[i] == (i < kSlab ? byte_at(kRecord + kPageBytes + i, 1) : 0));
  CHECK(fstat(fd, &after) == 0 && after.st_blocks == before.st_blocks);
  CHECK(engine->close(5s));
  ::close(fd);
}

void a_file_that_was_cut_is_short() {
  auto engine = mapping_engine(2);
  const int fd = memory_file("cut");
  fill(fd, 2 * kRecord);
  Pages memory(kSlabs * kSlab);
  CHECK(error_of_read(*engine, fd, 1, memory.data) == 0 && landed(memory.data, 1));
  CHECK(ftruncate(fd, static_cast<off_t>(2 * kRecord - 100)) == 0);  // the page is still there, but not all of it
  CHECK(error_of_read(*engine, fd, 1, memory.data) == ENODATA);
  CHECK(ftruncate(fd, static_cast<off_t>(kRecord)) == 0);
  CHECK(error_of_read(*engine, fd, 1, memory.data) == ENODATA);
  CHECK(error_of_read(*engine, fd, 0, memory.data) == 0 && landed(memory.data, 0));
  fill(fd, 3 * kRecord, 9);  // larger than what is mapped
  const uint64_t before = reads_issued();
  for (uint64_t number : {2, 0}) CHECK(error_of_read(*engine, fd, number, memory.data) == 0);
  CHECK(reads_issued() == before);
  CHECK(landed(memory.data, 0, 9));
  CHECK(engine->close(5s));
  ::close(fd);
}

void copies_end_where_the_file_does() {
  CHECK(catch_bus_errors());
  const int fd = memory_file("guarded");
  fill(fd, 8 * kPageBytes);
  void* const mapped = mmap(nullptr, 8 * kPageBytes, PROT_READ, MAP_SHARED, fd, 0);
  CHECK(mapped != MAP_FAILED);
  const auto* source = static_cast<const uint8_t*>(mapped);
  std::vector<std::thread> threads;
  std::atomic<int> cut{0};
  for (int i = 0; i < 3; i++)
    threads.emplace_back([&, i] {
      Pages target(8 * kPageBytes);
      for (int round = 0; round < 50; round++) {
        BusGuard guard;
        // By hand: what sanitizers put in memcpy's place is no copy that they let end early.
        const auto copy = [&] {
          for (uint64_t at = 0; at < 8 * kPageBytes; at += 8)
            *reinterpret_cast<volatile uint64_t*>(target.data + at) =
                *reinterpret_cast<const volatile uint64_t*>(source + at);
        };
        if (i == 0) CHECK(ftruncate(fd, static_cast<off_t>(3 * kPageBytes)) == 0);
        const int error = guard.run(source, 8 * kPageBytes, copy);
        CHECK(error == 0 || error == ENODATA);
        cut += error != 0;
        if (i == 0) CHECK(error == ENODATA && target.data[3 * kPageBytes - 1] == byte_at(3 * kPageBytes - 1, 1));
        if (i == 0 && round % 5 == 0) CHECK(ftruncate(fd, static_cast<off_t>(8 * kPageBytes)) == 0);
      }
    });
  for (std::thread& thread : threads) thread.join();
  CHECK(cut >= 50);
  munmap(mapped, 8 * kPageBytes);
  ::close(fd);
}

// Whether a child in which this happens dies of it.
template <typename Happens>
bool is_deadly(Happens happens) {
  const pid_t child = fork();
  CHECK(child >= 0);
  if (child == 0) {
    ::close(STDERR_FILENO);  // what a sanitizer has to say of it
    happens();
    _exit(0);
  }
  int status = 0;
  CHECK(waitpid(child, &status, 0) == child);
  return status != 0;
}

void faults_beside_a_copy_are_not_caught() {
  const int fd = memory_file("beside");
  fill(fd, 3 * kPageBytes);
  void* const mapped = mmap(nullptr, 3 * kPageBytes, PROT_READ, MAP_SHARED, fd, 0);
  CHECK(mapped != MAP_FAILED);
  const auto* pages = static_cast<const uint8_t*>(mapped);
  const auto touch = [&](int page) { return *static_cast<const volatile uint8_t*>(pages + page * kPageBytes); };
  CHECK(ftruncate(fd, 0) == 0);
  const auto touch_in_copy_of = [&](int page, int touched) {  // by the child's own guard
    BusGuard guard;
    return guard.run(pages + page * kPageBytes, kPageBytes, [&] { touch(touched); });
  };
  CHECK(!is_deadly([&] { CHECK(touch_in_copy_of(1, 1) == ENODATA); }));
  CHECK(is_deadly([&] { touch_in_copy_of(1, 0); }));
  CHECK(is_deadly([&] { touch_in_copy_of(1, 2); }));
  CHECK(is_deadly([&] {
    BusGuard guard;
    guard.run(pages, kPageBytes, [] {});
    touch(0);
  }));
  // In another thread than the one whose copy it is.
  CHECK(is_deadly([&] {
    BusGuard guard;
    guard.run(pages, kPageBytes, [&] { std::thread([&] { touch(0); }).join(); });
  }));
  munmap(mapped, 3 * kPageBytes);
  ::close(fd);
}

// Until a few copies met the cut, by threads of one that blocks the signal itself.
void cuts_race_with_reads() {
  sigset_t all, before;
  sigfillset(&all);
  CHECK(pthread_sigmask(SIG_SETMASK, &all, &before) == 0);
  auto engine = mapping_engine(3);
  CHECK(pthread_sigmask(SIG_SETMASK, &before, nullptr) == 0);
  const int fd = memory_file("race");
  fill(fd, kRecords * kRecord);
  std::atomic<bool> over{false};
  std::thread cutter([&] {
    while (!over) {
      CHECK(ftruncate(fd, static_cast<off_t>(kRecord + kPageBytes + 3 * kSlab)) == 0);
      fill(fd, kRecords * kRecord);
    }
  });
  const uint64_t enough = copies_ended_early() + 3;
  const auto deadline = std::chrono::steady_clock::now() + 60s;
  for (int round = 0; round < 20 || copies_ended_early() < enough; round++) {
    CHECK(std::chrono::steady_clock::now() < deadline);
    Pages arena(kRecords * kSlabs * kSlab);
    std::vector<OpSpec> specs;
    for (uint64_t number = 0; number < kRecords; number++)
      specs.push_back(record(kRead, fd, number, arena.data + number * kSlabs * kSlab));
    auto batch = submitted(*engine, specs);
    CHECK(batch->wait(20s));
    CHECK(batch->op(0).error == 0 && landed(arena.data, 0));
    for (size_t i = 1; i < batch->size(); i++) CHECK(batch->op(i).error == 0 || batch->op(i).error == ENODATA);
    if (round % 10 == 9) engine->forget(fd);
  }
  over = true;
  cutter.join();
  CHECK(engine->close(5s));
  ::close(fd);
}

void what_is_forgotten_is_unmapped() {
  auto engine = mapping_engine(2);
  const int fd = memory_file("evicted");
  fill(fd, kRecord);
  Pages memory(kSlabs * kSlab);
  CHECK(error_of_read(*engine, fd, 0, memory.data) == 0 && mapped("evicted") == 1);
  CHECK(unlink((in_memory + "/evicted").c_str()) == 0 && mapped("evicted") == 1);
  engine->forget(fd);
  CHECK(unmapped_soon("evicted"));
  engine->forget(fd);  // nothing is known of it
  CHECK(error_of_read(*engine, fd, 0, memory.data) == 0 && mapped("evicted") == 1);
  CHECK(engine->close(5s) && unmapped_soon("evicted"));
  ::close(fd);
}

void a_number_of_another_file_is_another_mapping() {
  auto engine = mapping_engine(1);
  Pages memory(kSlabs * kSlab);
  const int fd = memory_file("first"), other = memory_file("second");
  fill(fd, kRecord, 1);
  fill(other, kRecord, 2);
  CHECK(error_of_read(*engine, fd, 0, memory.data) == 0 && landed(memory.data, 0, 1));
  CHECK(dup2(other, fd) == fd);
  CHECK(error_of_read(*engine, fd, 0, memory.data) == 0 && landed(memory.data, 0, 2));
  CHECK(mapped("first") == 0);
  CHECK(engine->close(5s));
  ::close(fd);
  ::close(other);
}

void mappings_are_bounded() {
  Mappings mappings;
  std::vector<int> fds;
  for (size_t i = 0; i < kMappingsMax + 20; i++) {
    fds.push_back(memory_file("bound" + std::to_string(i)));
    CHECK(ftruncate(fds.back(), kPageBytes) == 0);
  }
  auto held = mappings.of(fds[0], kPageBytes);
  for (const int fd : fds) CHECK(mappings.of(fd, kPageBytes));
  CHECK(mapped("bound*") == static_cast<int>(kMappingsMax) + 1);
  CHECK(mapped("bound0") == 1 && mapped("bound1") == 0 && mapped("bound" + std::to_string(kMappingsMax)) == 1);
  held.reset();
  CHECK(mapped("bound*") == static_cast<int>(kMappingsMax));
  CHECK(ftruncate(fds[5], static_cast<off_t>(kMappedBytesMax)) == 0);  // as much as all together may be
  CHECK(mappings.of(fds[5], static_cast<int64_t>(kMappedBytesMax)) && mapped("bound*") == 1);
  CHECK(mappings.of(fds[6], kPageBytes) && mapped("bound*") == 1);
  CHECK(ftruncate(fds[7], static_cast<off_t>(kMappedBytesMax + kPageBytes)) == 0);
  CHECK(!mappings.of(fds[7], kPageBytes) && mapped("bound6") == 1);
  mappings.clear();
  CHECK(mapped("bound*") == 0);
  for (const int fd : fds) ::close(fd);
}

void only_files_in_memory_that_are_ours_to_write() {
  Mappings mappings;
  const int fd = memory_file("ours"), read_only = open((in_memory + "/ours").c_str(), O_RDONLY);
  CHECK(ftruncate(fd, kPageBytes) == 0);
  CHECK(mappings.of(fd, kPageBytes) && !mappings.of(read_only, kPageBytes) && !mappings.of(fd, 2 * kPageBytes));
  CHECK(!mappings.of(-1, kPageBytes));
  const int proc = open("/proc/self/oom_score_adj", O_RDWR);
  CHECK(proc >= 0 && !mappings.of(proc, 0));
  for (const int each : {fd, read_only, proc}) ::close(each);
}

// Last of all: there is no way back.
void without_the_handler_nothing_is_mapped() {
  auto engine = mapping_engine(2);
  const int fd = memory_file("replaced");
  fill(fd, kRecord);
  Pages memory(kSlabs * kSlab);
  CHECK(error_of_read(*engine, fd, 0, memory.data) == 0 && engine->still_maps());
  signal(SIGBUS, SIG_IGN);
  const uint64_t before = reads_issued();
  CHECK(error_of_read(*engine, fd, 0, memory.data) == 0 && landed(memory.data, 0));
  CHECK(reads_issued() > before && !engine->still_maps());
  auto later = mapping_engine(1);
  CHECK(!later->still_maps() && later->close(5s));
  CHECK(engine->close(5s));
  ::close(fd);
}

}  // namespace

void mapped_files_are_read(const std::string& tmpfs) {
  in_memory = tmpfs;
  if (in_memory.empty()) return;
  the_kernel_is_not_asked_to_read();
  holes_are_left_to_the_kernel();
  a_file_that_was_cut_is_short();
  copies_end_where_the_file_does();
  faults_beside_a_copy_are_not_caught();
  cuts_race_with_reads();
  what_is_forgotten_is_unmapped();
  a_number_of_another_file_is_another_mapping();
  mappings_are_bounded();
  only_files_in_memory_that_are_ours_to_write();
  without_the_handler_nothing_is_mapped();
}
