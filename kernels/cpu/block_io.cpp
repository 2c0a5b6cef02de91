// See block_io.h. Direct reads go through Linux's native AIO by its system calls, which needs neither a library nor threads; a
// context is the calling thread's own.
#include "block_io.h"

#include <fcntl.h>
#include <sys/types.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <vector>

#if defined(__linux__)
#include <linux/aio_abi.h>
#include <sys/syscall.h>
#endif

namespace ktopt {
namespace {

constexpr int64_t PAGE = 4096;

// Parts side by side in one file, [first, end).
struct Run {
    int64_t first, end;
};

class Reading {
  public:
    Reading(const PartRead* parts, int64_t count, int64_t nbytes, const ReadBuffers& buffers)
        : parts_(parts), nbytes_(nbytes), buffers_(buffers) {
        for (int64_t first = 0, end; first < count; first = end) {
            for (end = first + 1; end < count && beside(end) && reach(first, end + 1) <= most(); end++) {}
            runs_.push_back({first, end});
        }
    }

    ReadResult run() {
        if (buffers_.data == nullptr) through_cache();
        else if (!all_at_once()) one_by_one();
        return result_;
    }

  private:
    const PartRead* parts_;
    const int64_t nbytes_;
    const ReadBuffers buffers_;
    std::vector<Run> runs_;
    ReadResult result_ = {-1, 0};

    bool beside(int64_t part) const {
        return parts_[part].fd == parts_[part - 1].fd && parts_[part].offset == parts_[part - 1].offset + nbytes_;
    }
    int64_t most() const { return buffers_.data == nullptr ? INT64_MAX : buffers_.piece_bytes; }
    int64_t begin(const Run& run) const { return parts_[run.first].offset / PAGE * PAGE; }
    // Bytes of the pages that hold parts [first, end).
    int64_t reach(int64_t first, int64_t end) const {
        return (parts_[first].offset + (end - first) * nbytes_ + PAGE - 1) / PAGE * PAGE - begin({first, end});
    }

    bool failed(int64_t part, int error) {
        if (result_.index < 0) result_ = {part, error};
        return false;
    }

    // Whether a direct read has met the file's end: else it stops at a page.
    bool ends(int64_t got, int64_t wanted) const { return buffers_.data != nullptr && got < wanted && got % PAGE != 0; }

    // Read all of it, or note why not.
    bool fill(const Run& run, uint8_t* to, int64_t wanted, int64_t offset) {
        while (wanted > 0) {
            const ssize_t done = pread(parts_[run.first].fd, to, size_t(wanted), off_t(offset));
            if (done < 0 && errno == EINTR) continue;
            if (done < 0) return failed(run.first, errno);
            if (done == 0 || ends(done, wanted)) return failed(run.first, ReadResult::ENDED);
            to += done, offset += done, wanted -= done;
        }
        return true;
    }

    void verify(int64_t part) {
        const PartRead& p = parts_[part];
        if (crc32(p.begun, p.to, size_t(nbytes_)) != p.expected) failed(part, ReadResult::CHANGED);
    }

    // A run's parts out of the pages that hold them.
    void take(const Run& run, const uint8_t* pages) {
        pages += parts_[run.first].offset - begin(run);
        for (int64_t part = run.first; part < run.end; part++, pages += nbytes_) {
            std::memcpy(parts_[part].to, pages, size_t(nbytes_));
            verify(part);
        }
    }

    void through_cache() {
#if defined(POSIX_FADV_WILLNEED)
        if (runs_.size() > 1)
            for (const Run& run : runs_)
                posix_fadvise(parts_[run.first].fd, off_t(parts_[run.first].offset), off_t((run.end - run.first) * nbytes_),
                              POSIX_FADV_WILLNEED);
#endif
        for (const Run& run : runs_)
            for (int64_t part = run.first; part < run.end; part++)
                if (fill({part, part + 1}, parts_[part].to, nbytes_, parts_[part].offset)) verify(part);
    }

    void one_by_one() {
        for (const Run& run : runs_)
            if (fill(run, buffers_.data, reach(run.first, run.end), begin(run))) take(run, buffers_.data);
    }

#if defined(__linux__)
    // A thread's context for reads; 0 where the system gives none. A forked child has none of its parent's.
    struct Context {
        aio_context_t id = 0;
        pid_t owner = 0;
        int64_t depth = 0;

        aio_context_t get(int64_t wanted) {
            if (owner != getpid()) id = 0;
            if (id != 0 && depth < wanted) {
                syscall(SYS_io_destroy, id);
                id = 0;
            }
            if (id == 0 && syscall(SYS_io_setup, wanted, &id) != 0) id = 0;
            owner = getpid(), depth = wanted;
            return id;
        }
        ~Context() {
            if (id != 0 && owner == getpid()) syscall(SYS_io_destroy, id);
        }
    };

    // False where the system doesn't read so; then nothing has been read.
    bool all_at_once() {
        static thread_local Context mine;
        const int64_t depth = std::min<int64_t>(buffers_.depth, int64_t(runs_.size()));
        if (depth < 2) return false;
        const aio_context_t context = mine.get(buffers_.depth);
        if (context == 0) return false;
        std::vector<iocb> asked(size_t(depth), iocb{});
        std::vector<io_event> events(size_t(depth), io_event{});
        std::vector<int64_t> free;
        for (int64_t piece = depth; piece-- > 0;) free.push_back(piece);
        size_t next = 0;
        int64_t under_way = 0;
        bool ever = false;
        while (next < runs_.size() || under_way > 0) {
            std::vector<iocb*> some;
            for (; !free.empty() && next < runs_.size(); next++) {
                some.push_back(&ask(asked[size_t(free.back())], free.back(), int64_t(next)));
                free.pop_back();
            }
            for (size_t sent = 0; sent < some.size();) {
                const long taken = syscall(SYS_io_submit, context, long(some.size() - sent), some.data() + sent);
                if (taken > 0) {
                    ever = true, sent += size_t(taken), under_way += taken;
                    continue;
                }
                if (taken < 0 && errno == EINTR) continue;
                if (!ever && sent == 0) return false;
                for (; sent < some.size(); sent++) {  // what it doesn't take is read here
                    const Run& run = runs_[size_t(some[sent]->aio_data)];
                    uint8_t* pages = reinterpret_cast<uint8_t*>(uintptr_t(some[sent]->aio_buf));
                    if (fill(run, pages, reach(run.first, run.end), begin(run))) take(run, pages);
                    free.push_back(some[sent] - asked.data());
                }
            }
            if (under_way == 0) continue;
            const long done = syscall(SYS_io_getevents, context, 1l, long(under_way), events.data(), nullptr);
            for (long e = 0; e < done; e++) {
                const iocb* finished = reinterpret_cast<const iocb*>(uintptr_t(events[size_t(e)].obj));
                end(*finished, events[size_t(e)].res);
                free.push_back(finished - asked.data());
            }
            if (done > 0) under_way -= done;
        }
        return true;
    }

    iocb& ask(iocb& request, int64_t piece, int64_t number) {
        const Run& run = runs_[size_t(number)];
        request = iocb{};
        request.aio_data = uint64_t(number);
        request.aio_lio_opcode = IOCB_CMD_PREAD;
        request.aio_fildes = uint32_t(parts_[run.first].fd);
        request.aio_buf = uint64_t(uintptr_t(buffers_.data + piece * buffers_.piece_bytes));
        request.aio_nbytes = uint64_t(reach(run.first, run.end));
        request.aio_offset = begin(run);
        return request;
    }

    // A read of `got` bytes has ended, or with -errno.
    void end(const iocb& request, int64_t got) {
        const Run& run = runs_[size_t(request.aio_data)];
        uint8_t* pages = reinterpret_cast<uint8_t*>(uintptr_t(request.aio_buf));
        const int64_t wanted = int64_t(request.aio_nbytes);
        if (got < 0) failed(run.first, int(-got));
        else if (ends(got, wanted)) failed(run.first, ReadResult::ENDED);
        else if (got == wanted || fill(run, pages + got, wanted - got, request.aio_offset + got)) take(run, pages);
    }
#else
    bool all_at_once() { return false; }
#endif
};

}  // namespace

ReadResult read_parts(const PartRead* parts, int64_t count, int64_t nbytes, const ReadBuffers& buffers) {
    return Reading(parts, count, nbytes, buffers).run();
}

}  // namespace ktopt
