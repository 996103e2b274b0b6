// The threads that calls share; see threads.hpp.
#include <pthread.h>
#ifdef __linux__
#include <sched.h>
#endif

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
  size_t most_threads;
  size_t num_threads = 0;  // that work on it, its owner's included
  size_t next = 0;         // the first chunk that nobody took
  size_t unfinished = 0;   // of those that were taken or not
};

#ifdef __linux__
bool pin(pthread_t thread, const std::vector<int>& processors) {
  cpu_set_t set;
  CPU_ZERO(&set);
  for (const int processor : processors) {
    if (processor < 0 || processor >= CPU_SETSIZE) return false;
    CPU_SET(processor, &set);
  }
  return pthread_setaffinity_np(thread, sizeof set, &set) == 0;
}
#else
bool pin(pthread_t, const std::vector<int>&) {
  return false;
}
#endif

class Pool {
 public:
  void run(Job& job) {
    std::unique_lock<std::mutex> lock(mutex_);
    grow(processors_.empty() ? job.most_threads - 1 : job.most_threads);
    const bool takes_part = processors_.empty() || threads_.empty();
    job.num_threads = takes_part ? 1 : 0;
    job.unfinished = job.num_chunks;
    waiting_.push_back(&job);
    wake_.notify_all();
    while (takes_part && job.next < job.num_chunks) take_one(job, lock);
    done_.wait(lock, [&] { return job.unfinished == 0; });
  }

  size_t num_threads() {
    std::lock_guard<std::mutex> lock(mutex_);
    return threads_.size();
  }

  bool set_affinity(const std::vector<int>& processors) {
    std::lock_guard<std::mutex> lock(mutex_);
    for (const pthread_t thread : threads_) {
      if (!pin(thread, processors)) return false;
    }
    processors_ = processors;
    return true;
  }

 private:
  void grow(size_t wanted) {
    while (threads_.size() < wanted) {
      try {
        std::thread thread([this] { serve(); });
        if (!processors_.empty()) pin(thread.native_handle(), processors_);
        threads_.push_back(thread.native_handle());
        thread.detach();
      } catch (const std::system_error&) {
        return;  // the caller's thread takes what others don't
      }
    }
  }

  [[noreturn]] void serve() {
    std::unique_lock<std::mutex> lock(mutex_);
    for (;;) {
      Job* job = nullptr;
      wake_.wait(lock, [&] { return (job = open_job()) != nullptr; });
      ++job->num_threads;
      while (job->next < job->num_chunks && take_one(*job, lock)) {
      }
    }
  }

  // The oldest job that wants another thread. A job is in `waiting_` while it has chunks to take.
  Job* open_job() {
    for (Job* job : waiting_) {
      if (job->num_threads < job->most_threads) return job;
    }
    return nullptr;
  }

  // Takes a chunk under the lock and works on it without. Returns false where the job is over: its owner may return,
  // and the job with it, as soon as the lock is free.
  bool take_one(Job& job, std::unique_lock<std::mutex>& lock) {
    const size_t chunk = job.next++;
    if (job.next == job.num_chunks) waiting_.erase(std::find(waiting_.begin(), waiting_.end(), &job));
    lock.unlock();
    job.work(job.context, chunk);
    lock.lock();
    if (--job.unfinished > 0) return true;
    done_.notify_all();
    return false;
  }

  std::mutex mutex_;
  std::condition_variable wake_, done_;
  std::deque<Job*> waiting_;
  std::vector<pthread_t> threads_;
  std::vector<int> processors_;
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

void run_chunks(size_t num_chunks, size_t num_threads, ChunkWork work, const void* context) {
  Job job{work, context, num_chunks, num_threads};
  pool().run(job);
}

size_t num_pool_threads() {
  return pool().num_threads();
}

bool set_pool_affinity(const std::vector<int>& processors) {
  return pool().set_affinity(processors);
}

}  // namespace raydz
