// Memory of one thread that is used again from call to call.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstdlib>

namespace ktopt {

// Pieces are handed out one after the other, each at a cache line, until `reset`; memory grows to the most that was asked for.
class Scratch {
public:
    // Space for so many bytes in all, of which `take` gives pieces. False where there is no memory.
    bool reset(size_t bytes) {
        used_ = 0;
        if (bytes <= size_) return true;
        std::free(memory_);
        size_ = (bytes + 4095) / 4096 * 4096;
        memory_ = static_cast<uint8_t*>(std::aligned_alloc(64, size_));
        if (memory_ == nullptr) size_ = 0;
        return memory_ != nullptr;
    }

    template <class T>
    T* take(size_t count) {
        T* piece = reinterpret_cast<T*>(memory_ + used_);
        used_ += room<T>(count);
        return piece;
    }

    // What a piece takes of the space.
    template <class T>
    static constexpr size_t room(size_t count) { return (count * sizeof(T) + 63) / 64 * 64; }

    Scratch() = default;
    Scratch(const Scratch&) = delete;
    Scratch& operator=(const Scratch&) = delete;
    ~Scratch() { std::free(memory_); }

private:
    uint8_t* memory_ = nullptr;
    size_t size_ = 0, used_ = 0;
};

}  // namespace ktopt
