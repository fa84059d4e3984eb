// Team: the threads of a forward, which share the items of its loops.
//
// An OpenMP runtime is not used: its threads either spin, which collapses when another process
// wants the cores, or sleep, which costs half as much again on an idle machine. Here they spin for
// microseconds between the loops of a step, then yield, and sleep between steps.
#pragma once

#include <atomic>
#include <functional>
#include <memory>
#include <thread>
#include <vector>
#include <sched.h>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace specdec {

inline void pause() {
#if defined(__x86_64__)
    _mm_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}

class Team {
public:
    // What one thread of the team sees.
    class Member {
    public:
        const int index;

        // Run `item(i)` for i in [0, count) somewhere in the team; return when all are done.
        // Each thread has its own run of neighbours, then helps the others with theirs.
        template <class F>
        void each(int count, F item) {
            const int size = team.size();
            for (int turn = 0; turn < size; turn++) {
                const int owner = (index + turn) % size;
                const int begin = first(owner, count), end = first(owner + 1, count);
                std::atomic<int> &next = team.taken[owner].value;
                for (int i; (i = begin + next.fetch_add(1, std::memory_order_relaxed)) < end;)
                    item(i);
            }
            team.meet();
        }

    private:
        friend class Team;
        Team &team;
        Member(Team &t, int i) : index(i), team(t) {}
        int first(int owner, int count) const { return (int)((int64_t)count * owner / team.size()); }
    };

    explicit Team(int size) : taken(size) {
        for (int i = 1; i < size; i++) workers.emplace_back([this, i] { work(i); });
    }

    ~Team() {
        is_closed = true;
        announce();
        for (std::thread &worker : workers) worker.join();
    }

    int size() const { return (int)taken.size(); }

    // Run `function(member)` on every thread; return when all have.
    void run(const std::function<void(Member &)> &function) {
        job = &function;
        announce();
        Member self(*this, 0);
        function(self);
        meet();
    }

private:
    struct alignas(64) Counter {
        std::atomic<int> value{0};
    };
    static constexpr int SPINS = 2000;  // some tens of microseconds

    std::vector<Counter> taken;  // items begun, per run of neighbours
    std::vector<std::thread> workers;
    const std::function<void(Member &)> *job = nullptr;
    bool is_closed = false;
    alignas(64) std::atomic<uint32_t> jobs{0};
    alignas(64) std::atomic<int> arrived{0};
    alignas(64) std::atomic<uint32_t> meetings{0};

    void announce() {
        jobs.fetch_add(1, std::memory_order_release);
        jobs.notify_all();
    }

    void work(int index) {
        Member self(*this, index);
        uint32_t seen = 0;
        for (;;) {
            for (int i = 0; i < SPINS && jobs.load(std::memory_order_acquire) == seen; i++) pause();
            jobs.wait(seen, std::memory_order_acquire);
            seen++;
            if (is_closed) return;
            (*job)(self);
            meet();
        }
    }

    // Wait for all; the last one clears the counters for the next loop.
    void meet() {
        const uint32_t now = meetings.load(std::memory_order_relaxed);
        if (arrived.fetch_add(1, std::memory_order_acq_rel) + 1 == size()) {
            for (Counter &counter : taken) counter.value.store(0, std::memory_order_relaxed);
            arrived.store(0, std::memory_order_relaxed);
            meetings.store(now + 1, std::memory_order_release);
            return;
        }
        for (int i = 0; meetings.load(std::memory_order_acquire) == now; i++)
            if (i < SPINS) pause();
            else sched_yield();
    }
};

}  // namespace specdec
