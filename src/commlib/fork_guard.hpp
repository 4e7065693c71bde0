// SPDX-License-Identifier: Apache-2.0
// A forked child (a data loader) must not keep the connections of its parent open, or nobody sees the parent die. The one
// place in the core that knows all workers of a process, because pthread_atfork takes a function and nothing else.
#pragma once

namespace commlib {

class ForkGuard {
 public:
  class Member {
   public:
    Member();
    virtual ~Member();
    Member(const Member&) = delete;
    Member& operator=(const Member&) = delete;

   private:
    friend class ForkGuard;
    // In a child, between fork and anything else: async-signal-safe, closes descriptors and nothing more.
    virtual void in_forked_child() noexcept = 0;
  };

 private:
  friend class Member;
  static void before_fork() noexcept;
  static void after_fork_in_parent() noexcept;
  static void after_fork_in_child() noexcept;
};

}  // namespace commlib
