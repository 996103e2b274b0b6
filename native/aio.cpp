// See aio.hpp. A worker owns a ring (or nothing), takes blocks of the waiting requests and reports how each one ended.
#include "aio.hpp"

#include <pthread.h>
#include <signal.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <condition_variable>
#include <deque>
#include <mutex>
#include <stdexcept>
#include <system_error>
#include <thread>
#include <unordered_map>

#include "uring.hpp"

namespace raydz {
namespace {

constexpr uint64_t kMaxRegistered = 1 << 30;  // the kernel's limit of one registered buffer
constexpr unsigned kMaxThreads = 32;
constexpr int kMaxRetries = 1000;

struct Request {
  bool is_write;
  int fd;
  char* data;
  uint64_t bytes, offset;
  uint64_t begun = 0;      // bytes in blocks that a worker took
  unsigned in_flight = 0;  // blocks
  AioResult result{};
  std::vector<std::shared_ptr<Request>> followers{};  // begin when this one is done

  bool is_done() const { return begun == bytes && in_flight == 0; }
};

struct Block {
  std::shared_ptr<Request> request;
  Transfer left;
  int num_retries = 0;
  bool is_continued = false;

  // Takes what read, write or a completion returned. True: there is more to do, in `left`.
  bool advance(int64_t result, int* error) {
    *error = 0;
    if (result == -EINTR || result == -EAGAIN) {
      if (++num_retries <= kMaxRetries) return true;
    }
    if (result < 0) {
      // The rest of a read that ended within a sector, at the file's end, cannot be read directly.
      *error = result == -EINVAL && is_continued && !left.is_write ? ENODATA : static_cast<int>(-result);
      return false;
    }
    if (result == 0) {
      *error = left.is_write ? EIO : ENODATA;
      return false;
    }
    const auto count = static_cast<uint32_t>(result);
    left.data += count;
    left.offset += count;
    left.bytes -= count;
    is_continued = true;
    return left.bytes > 0;
  }
};

std::vector<iovec> pieces_of(const std::vector<iovec>& buffers) {
  std::vector<iovec> pieces;
  for (const iovec& buffer : buffers) {
    for (uint64_t start = 0; start < buffer.iov_len; start += kMaxRegistered) {
      const uint64_t bytes = std::min<uint64_t>(kMaxRegistered, buffer.iov_len - start);
      pieces.push_back({static_cast<char*>(buffer.iov_base) + start, bytes});
    }
  }
  return pieces;
}

}  // namespace

struct AioQueue::State {
  AioOptions options;
  std::vector<int> files;
  std::vector<iovec> buffers;
  bool has_ring = false;
  int ring_error = 0, buffers_error = 0;
  std::vector<std::unique_ptr<Ring>> rings;

  std::mutex mutex;
  std::condition_variable work, done;
  std::deque<std::shared_ptr<Request>> waiting[2];  // reads, writes: those with blocks to begin
  std::unordered_map<uint64_t, std::shared_ptr<Request>> requests;
  uint64_t next_id = 1;
  unsigned next_kind = 0, running = 0, in_flight = 0;
  AioCounts counts;
  bool is_closing = false;

  void open_rings();
  static void start(const std::shared_ptr<State>& self, unsigned num_threads);
  bool has_work() const { return !waiting[0].empty() || !waiting[1].empty(); }
  bool next_block(Block* block);
  void finish(const Block& block, int error);
  void begin(const std::shared_ptr<Request>& request);
  void cancel(Request& request, int error, uint64_t offset);
  void release_followers(Request& request);
  int index_of(const char* data, uint64_t bytes) const;
  void serve(Ring* ring);
  void serve_ring(Ring& ring);
  void serve_plain();
};

// All rings or none, so that what a run does doesn't depend on how many could be had.
void AioQueue::State::open_rings() {
  if (options.use_threads) return;
  for (unsigned worker = 0; worker < options.num_workers; ++worker) {
    auto ring = Ring::open(options.queue_depth, &ring_error);
    if (ring == nullptr) return rings.clear();
    rings.push_back(std::move(ring));
  }
  has_ring = true;
  for (auto& ring : rings) {
    if (buffers_error == 0) buffers_error = ring->register_buffers(buffers);
    if (ring->register_files(files) != 0) files.clear();
  }
  if (buffers_error != 0) buffers.clear();
}

int AioQueue::State::index_of(const char* data, uint64_t bytes) const {
  for (size_t index = 0; index < buffers.size(); ++index) {
    const char* base = static_cast<const char*>(buffers[index].iov_base);
    if (data >= base && data + bytes <= base + buffers[index].iov_len) return static_cast<int>(index);
  }
  return -1;
}

// Under the lock. Reads and writes in turn, so that a device that does both at a time is kept busy both ways.
bool AioQueue::State::next_block(Block* block) {
  if (!has_work()) return false;
  auto& queue = waiting[next_kind].empty() ? waiting[1 - next_kind] : waiting[next_kind];
  next_kind = 1 - next_kind;
  const std::shared_ptr<Request> request = queue.front();
  Transfer t;
  t.is_write = request->is_write;
  t.fd = request->fd;
  t.data = request->data + request->begun;
  t.bytes = static_cast<uint32_t>(std::min<uint64_t>(options.block_bytes, request->bytes - request->begun));
  t.offset = request->offset + request->begun;
  if (has_ring) {
    t.buffer = index_of(t.data, t.bytes);
    const auto file = std::find(files.begin(), files.end(), t.fd);
    t.file = file == files.end() ? -1 : static_cast<int>(file - files.begin());
  }
  request->begun += t.bytes;
  ++request->in_flight;
  ++counts.blocks;
  counts.most_in_flight = std::max(counts.most_in_flight, ++in_flight);
  if (request->begun == request->bytes) queue.pop_front();
  *block = {request, t};
  return true;
}

// Under the lock.
void AioQueue::State::begin(const std::shared_ptr<Request>& request) {
  if (request->bytes == 0 || is_closing) return cancel(*request, is_closing ? ECANCELED : 0, request->offset);
  waiting[request->is_write ? 1 : 0].push_back(request);
  work.notify_all();
}

// Under the lock. Nothing more of the request is begun; the first error is the one that counts.
void AioQueue::State::cancel(Request& request, int error, uint64_t offset) {
  if (request.result.error == 0) request.result = {error, offset};
  auto& queue = waiting[request.is_write ? 1 : 0];
  const auto is_it = [&](const std::shared_ptr<Request>& other) { return other.get() == &request; };
  queue.erase(std::remove_if(queue.begin(), queue.end(), is_it), queue.end());
  request.begun = request.bytes;
  if (request.in_flight == 0) release_followers(request);
}

// Under the lock. What follows a failed request fails, too.
void AioQueue::State::release_followers(Request& request) {
  done.notify_all();
  const auto followers = std::move(request.followers);
  request.followers.clear();
  for (const auto& follower : followers) {
    if (request.result.error != 0) {
      cancel(*follower, ECANCELED, follower->offset);
    } else {
      begin(follower);
    }
  }
}

// Under the lock.
void AioQueue::State::finish(const Block& block, int error) {
  Request& request = *block.request;
  --request.in_flight;
  --in_flight;
  if (error != 0) {
    cancel(request, error, block.left.offset);
  } else if (request.is_done()) {
    release_followers(request);
  }
}

void AioQueue::State::serve(Ring* ring) {
  if (ring != nullptr) {
    serve_ring(*ring);
  } else {
    serve_plain();
  }
  std::lock_guard<std::mutex> lock(mutex);
  --running;
  done.notify_all();
}

void AioQueue::State::serve_ring(Ring& ring) {
  std::vector<Block> blocks(options.queue_depth);
  std::vector<unsigned> empty(options.queue_depth);
  for (unsigned slot = 0; slot < options.queue_depth; ++slot) empty[slot] = slot;
  std::unique_lock<std::mutex> lock(mutex);
  for (;;) {
    const bool is_idle = empty.size() == blocks.size();
    if (is_idle) work.wait(lock, [this] { return is_closing || has_work(); });
    if (is_idle && is_closing) return;
    while (!empty.empty() && (is_idle || options.overlap_events) && next_block(&blocks[empty.back()])) {
      ring.prepare(blocks[empty.back()].left, empty.back());
      empty.pop_back();
      counts.begun_in_between += is_idle ? 0 : 1;
      counts.calls += options.single_submit ? 1 : 0;
      if (options.single_submit) ring.enter(0);  // what it could not hand over is handed over below
    }
    ++counts.calls;
    lock.unlock();
    const int error = ring.enter(1);
    if (error != 0) std::this_thread::sleep_for(std::chrono::milliseconds(1));
    lock.lock();
    for (Completion completion; ring.take(&completion);) {
      Block& block = blocks[completion.tag];
      int why;
      if (block.advance(completion.result, &why)) {
        ring.prepare(block.left, completion.tag);
      } else {
        finish(block, why);
        block = {};
        empty.push_back(static_cast<unsigned>(completion.tag));
      }
    }
  }
}

void AioQueue::State::serve_plain() {
  std::unique_lock<std::mutex> lock(mutex);
  for (;;) {
    work.wait(lock, [this] { return is_closing || has_work(); });
    Block block;
    if (!next_block(&block)) return;
    ++counts.calls;
    lock.unlock();
    int error;
    ssize_t count;
    do {
      const Transfer& t = block.left;
      const auto offset = static_cast<off_t>(t.offset);
      count = t.is_write ? pwrite(t.fd, t.data, t.bytes, offset) : pread(t.fd, t.data, t.bytes, offset);
    } while (block.advance(count < 0 ? -errno : count, &error));
    lock.lock();
    finish(block, error);
  }
}

// As many as the system has room for, one at least. Signals are for the interpreter's threads.
void AioQueue::State::start(const std::shared_ptr<State>& self, unsigned num_threads) {
  sigset_t all, before;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &before);
  std::unique_lock<std::mutex> lock(self->mutex);
  bool is_full = false;
  while (self->running < num_threads && !is_full) {
    Ring* ring = self->has_ring ? self->rings[self->running].get() : nullptr;
    try {
      std::thread([self, ring] { self->serve(ring); }).detach();
      ++self->running;
    } catch (const std::system_error&) {
      is_full = true;
    }
  }
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
  if (self->running == 0) throw std::runtime_error("raydz._native: the system has no room for a thread");
}

AioQueue::AioQueue(const AioOptions& options, const std::vector<int>& files, const std::vector<iovec>& buffers)
    : state_(std::make_shared<State>()) {
  state_->options = options;
  state_->files = files;
  state_->buffers = pieces_of(buffers);
  state_->open_rings();
  const unsigned num_threads = std::min(options.num_workers * options.queue_depth, kMaxThreads);
  State::start(state_, state_->has_ring ? options.num_workers : num_threads);
}

AioQueue::~AioQueue() {
  close(0);
}

uint64_t AioQueue::submit(bool is_write, int fd, char* data, uint64_t bytes, uint64_t offset, uint64_t after) {
  auto request = std::make_shared<Request>(Request{is_write, fd, data, bytes, offset});
  std::lock_guard<std::mutex> lock(state_->mutex);
  const uint64_t id = state_->next_id++;
  state_->requests.emplace(id, request);
  const auto found = state_->requests.find(after);
  if (found != state_->requests.end() && !found->second->is_done()) {
    found->second->followers.push_back(request);
  } else if (found != state_->requests.end() && found->second->result.error != 0) {
    state_->cancel(*request, ECANCELED, offset);
  } else {
    state_->begin(request);
  }
  return id;
}

bool AioQueue::wait(uint64_t id, double timeout_s, AioResult* result) {
  std::unique_lock<std::mutex> lock(state_->mutex);
  const auto found = state_->requests.find(id);
  if (found == state_->requests.end()) {
    *result = {EINVAL, 0};
    return true;
  }
  const std::shared_ptr<Request> request = found->second;
  const auto limit = std::chrono::duration<double>(timeout_s);
  if (!state_->done.wait_for(lock, limit, [&] { return request->is_done(); })) return false;
  *result = request->result;
  state_->requests.erase(id);
  return true;
}

bool AioQueue::close(double timeout_s) {
  std::unique_lock<std::mutex> lock(state_->mutex);
  state_->is_closing = true;
  for (auto& entry : state_->requests) {
    Request& request = *entry.second;
    if (request.begun < request.bytes) state_->cancel(request, ECANCELED, request.offset + request.begun);
  }
  state_->work.notify_all();
  const auto limit = std::chrono::duration<double>(timeout_s);
  if (!state_->done.wait_for(lock, limit, [this] { return state_->running == 0; })) return false;
  state_->rings.clear();  // the kernel lets go of buffers and files
  return true;
}

AioCounts AioQueue::counts() const {
  std::lock_guard<std::mutex> lock(state_->mutex);
  return state_->counts;
}

bool AioQueue::uses_io_uring() const {
  return state_->has_ring;
}

int AioQueue::ring_error() const {
  return state_->ring_error;
}

int AioQueue::buffers_error() const {
  return state_->buffers_error;
}

}  // namespace raydz
