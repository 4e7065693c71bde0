# SPDX-License-Identifier: Apache-2.0
# What of the core the binding sees. Declarations only; every function is noexcept or translated.

from libc.stdint cimport int32_t, int64_t, uint32_t, uint64_t
from libcpp cimport bool
from libcpp.memory cimport shared_ptr
from libcpp.pair cimport pair
from libcpp.string cimport string
from libcpp.vector cimport vector


cdef extern from "commlib/commlib.hpp" namespace "commlib" nogil:
    int current_exception(char* text, size_t bytes) noexcept


cdef inline int translate() except -1:
    # The exception in flight becomes the class of commlib.errors with its code.
    cdef char text[512]
    cdef int code = current_exception(text, sizeof(text))
    from commlib.errors import from_code
    raise from_code(code, (<bytes>text).decode("utf-8", "replace"))


cdef extern from "commlib/commlib.hpp" namespace "commlib" nogil:
    cdef enum class Errc(int):
        kOk
        kAgain
        kNotInitialized
        kMismatch
        kDuplicateName
        kPeerLost
        kTimeout
        kUnsupported
        kOutOfMemory
        kShutDown
        kInternal

    cdef enum class DType(unsigned char):
        pass

    cdef enum class ReduceOp(unsigned char):
        pass

    cdef enum class Collective(unsigned char):
        pass

    cdef enum class LocalRoute(unsigned char):
        pass

    cdef enum class Driver(unsigned char):
        kLoop
        kCaller
        kLater

    cdef cppclass CppFailure "commlib::Failure":
        Errc code
        uint32_t member

    cdef cppclass CppCompletionQueue "commlib::CompletionQueue":
        CppEventFd event
        CppInbox tokens

    cdef cppclass CppEventFd "commlib::EventFd":
        bool drain() noexcept
        int descriptor() noexcept

    cdef cppclass CppInbox "commlib::Inbox<std::uint64_t>":
        void drain(vector[uint64_t]* out) noexcept

    cdef cppclass CppCompletion "commlib::Completion":
        bool done() noexcept
        CppFailure failure() noexcept
        bool wait(int timeout_ms) noexcept
        void subscribe(shared_ptr[CppCompletionQueue] queue, uint64_t token) except +translate

    cdef cppclass CppKeyRecord "commlib::KeyRecord":
        string name
        uint64_t declared_key
        uint64_t cursor
        vector[pair[uint32_t, uint32_t]] extents
        bool try_take() noexcept
        void give_back() noexcept
        uint32_t rows() noexcept
        uint64_t rounds() noexcept

    cdef cppclass CppOperation "commlib::Operation":
        CppCompletion completion
        uint64_t round
        void* custody
        bool is_callers

    cdef cppclass CppWaiting "commlib::TaskTable::Waiting":
        string name
        uint64_t round
        int64_t submitted_ms

    cdef cppclass CppDisagreement "commlib::Disagreement":
        string name
        uint64_t round

    cdef cppclass CppLogRecord "commlib::LogRecord":
        int level
        char* text

    cdef cppclass WorkerOptions:
        uint32_t rank
        uint32_t size
        uint32_t local_rank
        uint32_t local_size
        uint32_t node
        uint32_t nodes
        uint32_t servers
        vector[uint32_t] node_of_rank
        vector[uint32_t] local_ranks
        vector[uint32_t] roots
        vector[uint32_t] ranks_per_host
        int table_fd
        vector[int] arena_fds
        vector[uint64_t] arena_bytes
        vector[int] local_pids
        vector[int] local_sockets
        vector[vector[int]] streams
        uint64_t partition_bytes
        uint64_t credit_bytes
        int64_t peer_timeout_ms
        LocalRoute route
        int log_level

    cdef cppclass Request:
        shared_ptr[CppKeyRecord] key
        uint64_t hash
        Collective collective
        ReduceOp op
        DType dtype
        uint32_t root
        int32_t priority
        const void* input
        void* output
        uint64_t count
        void* custody
        Driver driver

    cdef cppclass CppWorker "commlib::Worker":
        CppWorker(WorkerOptions options) except +translate

        @staticmethod
        size_t table_bytes(uint32_t local_size) noexcept

        Errc submit(const Request& request, shared_ptr[CppOperation]* operation) noexcept
        bool poll(CppOperation& operation) noexcept
        bool take(CppOperation& operation) noexcept
        bool drive(CppOperation& operation, int timeout_ms) noexcept
        bool wait(CppOperation& operation, int timeout_ms) noexcept
        void hand_over(CppOperation& operation) noexcept
        void settle() except +translate
        shared_ptr[CppOperation] reap() noexcept
        void* allocate(size_t bytes) noexcept
        void free(void* memory) noexcept
        size_t allocated_bytes() noexcept
        void abort(uint32_t member, int cause) noexcept
        bool aborted() noexcept
        uint32_t aborted_member() noexcept
        int aborted_cause() noexcept
        void shutdown(int timeout_ms) noexcept
        bool is_forked() noexcept
        bool take_log(CppLogRecord* record) noexcept
        int disagreement_descriptor() noexcept
        void take_disagreements(vector[CppDisagreement]* out) noexcept
        void waiting(int64_t older_than_ms, size_t limit, vector[CppWaiting]* out) except +translate
        uint64_t owner_received_bytes() noexcept
        uint64_t owner_sent_bytes() noexcept
        uint64_t finished_bytes() noexcept
        bool is_readable_by_others() noexcept

    cdef cppclass ServerOptions:
        uint32_t index
        uint32_t nodes
        uint32_t servers
        vector[uint32_t] roots
        vector[uint32_t] ranks_per_host
        vector[vector[int]] streams
        uint64_t partition_bytes
        uint64_t credit_bytes
        int64_t peer_timeout_ms
        int log_level

    cdef cppclass CppServer "commlib::Server":
        CppServer(ServerOptions options) except +translate
        void stop(int timeout_ms) noexcept
        bool aborted() noexcept
        uint32_t aborted_member() noexcept
        int aborted_cause() noexcept
        void abort(uint32_t member, int cause) noexcept
        bool take_log(CppLogRecord* record) noexcept
        uint64_t received_bytes() noexcept
        uint64_t sent_bytes() noexcept
