// The threads that calls share; see threads.hpp.
#include <pthread.h>

#include <atomic>
#include <condition_variable>
#include <deque>
#include <mutex>
#include <system_error>
#include <thread>

#include "threads.hpp"

namespace raydz {
namespace {

struct Job {
  ChunkWork work;
  const void* context;
  size_t num_chunks;
  size_t next = 0;        // the first chunk that nobody took
  size_t unfinished = 0;  // of those that were taken or not
};

class Pool {
 public:
  void run(Job& job) {
    std::unique_lock<std::mutex> lock(mutex_);
    grow(job.num_chunks - 1);
    job.unfinished = job.num_chunks;
    waiting_.push_back(&job);
    wake_.notify_all();
    while (job.next < job.num_chunks) take_one(job, lock);
    done_.wait(lock, [&] { return job.unfinished == 0; });
  }

  size_t num_threads() {
    std::lock_guard<std::mutex> lock(mutex_);
    return num_threads_;
  }

 private:
  void grow(size_t wanted) {
    while (num_threads_ < wanted) {
      try {
        std::thread([this] { serve(); }).detach();
      } catch (const std::system_error&) {
        return;  // the caller's thread takes what others don't
      }
      ++num_threads_;
    }
  }

  [[noreturn]] void serve() {
    std::unique_lock<std::mutex> lock(mutex_);
    for (;;) {
      wake_.wait(lock, [&] { return !waiting_.empty(); });
      take_one(*waiting_.front(), lock);
    }
  }

  // Takes a chunk under the lock and works on it without. A job is in `waiting_` while it has chunks to take.
  void take_one(Job& job, std::unique_lock<std::mutex>& lock) {
    const size_t chunk = job.next++;
    if (job.next == job.num_chunks) waiting_.erase(std::find(waiting_.begin(), waiting_.end(), &job));
    lock.unlock();
    job.work(job.context, chunk);
    lock.lock();
    if (--job.unfinished == 0) done_.notify_all();  // the last touch: its owner may return as soon as the lock is free
  }

  std::mutex mutex_;
  std::condition_variable wake_, done_;
  std::deque<Job*> waiting_;
  size_t num_threads_ = 0;
};

// Never destroyed: threads wait in it until the process ends. A child of fork has none of its parent's threads, and
// perhaps a lock that nobody will open, so it begins a pool of its own.
std::atomic<Pool*> current{nullptr};

Pool& pool() {
  static const bool is_registered = [] {
    current.store(new Pool);
    return pthread_atfork(nullptr, nullptr, [] { current.store(new Pool); }) == 0;
  }();
  (void)is_registered;
  return *current.load();
}

}  // namespace

void run_chunks(size_t num_chunks, ChunkWork work, const void* context) {
  Job job{work, context, num_chunks};
  pool().run(job);
}

size_t num_pool_threads() {
  return pool().num_threads();
}

}  // namespace raydz
