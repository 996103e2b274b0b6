// See uring.hpp. Source: io_uring(7), io_uring_setup(2), io_uring_enter(2), io_uring_register(2).
#include "uring.hpp"

#include <cerrno>

#if defined(__linux__) && __has_include(<linux/io_uring.h>)
#include <linux/io_uring.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cstring>

// Headers and kernels before 5.6 have no plain reads and writes at an offset; they go without.
#ifdef IORING_FEAT_RW_CUR_POS

namespace raydz {
namespace {

template <class T>
T* at(void* base, uint32_t offset) {
  return reinterpret_cast<T*>(static_cast<char*>(base) + offset);
}

}  // namespace

std::unique_ptr<Ring> Ring::open(unsigned depth, int* error) {
  std::unique_ptr<Ring> ring(new Ring);
  io_uring_params params;
  std::memset(&params, 0, sizeof params);
  ring->fd_ = static_cast<int>(syscall(__NR_io_uring_setup, depth, &params));
  if (ring->fd_ < 0) {
    *error = errno;
    return nullptr;
  }
  const unsigned needed = IORING_FEAT_SINGLE_MMAP | IORING_FEAT_RW_CUR_POS;
  *error = (params.features & needed) == needed ? ring->map(params) : ENOSYS;
  if (*error != 0) return nullptr;
  return ring;
}

int Ring::map(const io_uring_params& params) {
  const size_t sq_bytes = params.sq_off.array + params.sq_entries * sizeof(unsigned);
  const size_t cq_bytes = params.cq_off.cqes + params.cq_entries * sizeof(io_uring_cqe);
  queues_bytes_ = sq_bytes > cq_bytes ? sq_bytes : cq_bytes;
  entries_bytes_ = params.sq_entries * sizeof(io_uring_sqe);
  const auto mapped = [this](size_t bytes, off_t which) {
    void* memory = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, fd_, which);
    return memory == MAP_FAILED ? nullptr : memory;
  };
  queues_ = mapped(queues_bytes_, IORING_OFF_SQ_RING);
  if (queues_ == nullptr) return errno;
  entries_ = static_cast<io_uring_sqe*>(mapped(entries_bytes_, IORING_OFF_SQES));
  if (entries_ == nullptr) return errno;
  sq_tail_ = at<unsigned>(queues_, params.sq_off.tail);
  sq_array_ = at<unsigned>(queues_, params.sq_off.array);
  sq_mask_ = *at<unsigned>(queues_, params.sq_off.ring_mask);
  cq_head_ = at<unsigned>(queues_, params.cq_off.head);
  cq_tail_ = at<unsigned>(queues_, params.cq_off.tail);
  cq_mask_ = *at<unsigned>(queues_, params.cq_off.ring_mask);
  completions_ = at<io_uring_cqe>(queues_, params.cq_off.cqes);
  return 0;
}

Ring::~Ring() {
  if (entries_ != nullptr) munmap(entries_, entries_bytes_);
  if (queues_ != nullptr) munmap(queues_, queues_bytes_);
  if (fd_ >= 0) close(fd_);
}

int Ring::register_buffers(const std::vector<iovec>& buffers) {
  if (buffers.empty()) return 0;
  const auto count = static_cast<unsigned>(buffers.size());
  return syscall(__NR_io_uring_register, fd_, IORING_REGISTER_BUFFERS, buffers.data(), count) < 0 ? errno : 0;
}

int Ring::register_files(const std::vector<int>& files) {
  if (files.empty()) return 0;
  const auto count = static_cast<unsigned>(files.size());
  return syscall(__NR_io_uring_register, fd_, IORING_REGISTER_FILES, files.data(), count) < 0 ? errno : 0;
}

void Ring::prepare(const Transfer& transfer, uint64_t tag) {
  const unsigned tail = *sq_tail_, index = tail & sq_mask_;
  io_uring_sqe& entry = entries_[index];
  std::memset(&entry, 0, sizeof entry);
  const bool is_fixed = transfer.buffer >= 0;
  if (transfer.is_write) {
    entry.opcode = is_fixed ? IORING_OP_WRITE_FIXED : IORING_OP_WRITE;
  } else {
    entry.opcode = is_fixed ? IORING_OP_READ_FIXED : IORING_OP_READ;
  }
  entry.fd = transfer.file >= 0 ? transfer.file : transfer.fd;
  entry.flags = transfer.file >= 0 ? IOSQE_FIXED_FILE : 0;
  entry.buf_index = is_fixed ? static_cast<uint16_t>(transfer.buffer) : 0;
  entry.addr = reinterpret_cast<uint64_t>(transfer.data);
  entry.len = transfer.bytes;
  entry.off = transfer.offset;
  entry.user_data = tag;
  sq_array_[index] = index;
  __atomic_store_n(sq_tail_, tail + 1, __ATOMIC_RELEASE);
  ++queued_;
}

int Ring::enter(unsigned min_complete) {
  do {
    const long taken = syscall(__NR_io_uring_enter, fd_, queued_, min_complete, IORING_ENTER_GETEVENTS, nullptr, 0);
    if (taken >= 0) {
      queued_ -= static_cast<unsigned>(taken);
    } else if (errno != EINTR) {
      return errno;
    }
  } while (queued_ > 0);
  return 0;
}

bool Ring::take(Completion* completion) {
  const unsigned head = *cq_head_;
  if (head == __atomic_load_n(cq_tail_, __ATOMIC_ACQUIRE)) return false;
  const io_uring_cqe& entry = completions_[head & cq_mask_];
  *completion = {entry.user_data, entry.res};
  __atomic_store_n(cq_head_, head + 1, __ATOMIC_RELEASE);
  return true;
}

}  // namespace raydz

#define RAYDZ_HAS_IO_URING
#endif
#endif

#ifndef RAYDZ_HAS_IO_URING

namespace raydz {

std::unique_ptr<Ring> Ring::open(unsigned, int* error) {
  *error = ENOSYS;
  return nullptr;
}
Ring::~Ring() = default;
int Ring::register_buffers(const std::vector<iovec>&) {
  return ENOSYS;
}
int Ring::register_files(const std::vector<int>&) {
  return ENOSYS;
}
void Ring::prepare(const Transfer&, uint64_t) {}
int Ring::enter(unsigned) {
  return ENOSYS;
}
bool Ring::take(Completion*) {
  return false;
}

}  // namespace raydz

#endif
