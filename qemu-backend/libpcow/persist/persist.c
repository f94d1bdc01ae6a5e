/* SPDX-License-Identifier: BSD-3-Clause */
#include "persist/persist.h"

#include "persist/copy.h"

#include <cpuid.h>
#include <errno.h>
#include <immintrin.h>
#include <linux/magic.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/vfs.h>
#include <unistd.h>

#ifndef HUGETLBFS_MAGIC
#define HUGETLBFS_MAGIC 0x958458f6
#endif

#define CACHE_LINE 64u
/* from here on the caches are better left alone, in every class */
#define LARGE_COPY (UINT64_C(16) << 10)

#define DEFINE_FLUSH(name, target_attribute, instruction) \
    static target_attribute void name(const void *address, size_t length) \
    { \
        uintptr_t line = (uintptr_t)address & ~(uintptr_t)(CACHE_LINE - 1); \
\
        for (; line < (uintptr_t)address + length; line += CACHE_LINE) \
            instruction((void *)line); \
    }

DEFINE_FLUSH(flush_clwb, __attribute__((target("clwb"))), _mm_clwb)
DEFINE_FLUSH(flush_clflushopt, __attribute__((target("clflushopt"))), _mm_clflushopt)
DEFINE_FLUSH(flush_clflush, , _mm_clflush)

void persist_init(struct persist *persist, enum pcow_persistence persistence,
                  struct observer *observer)
{
    unsigned eax, ebx = 0, ecx, edx;

    persist->fixed_blocks = false;
    persist->failures = (struct failures){0};
    persist->observer = observer;
    persist->persistence = observer ? observer->persistence : persistence;
    persist->map_flags = persistence == PCOW_PERSISTENCE_PMEM && !observer
                             ? MAP_SHARED_VALIDATE | MAP_SYNC
                             : MAP_SHARED;
    /*
     * CPUID leaf 7: EBX bit 24 clwb, bit 23 clflushopt. clwb leaves the line in the cache, so it
     * comes first.
     */
    if (!__get_cpuid_count(7, 0, &eax, &ebx, &ecx, &edx))
        ebx = 0;
    if (ebx & 1u << 24)
        persist->flush_lines = flush_clwb;
    else if (ebx & 1u << 23)
        persist->flush_lines = flush_clflushopt;
    else
        persist->flush_lines = flush_clflush;
}

enum pcow_persistence persist_classify(int fd)
{
    struct statfs fs;
    void *probe;

    if (fstatfs(fd, &fs) == 0
        && ((uint32_t)fs.f_type == TMPFS_MAGIC || (uint32_t)fs.f_type == HUGETLBFS_MAGIC
            || (uint32_t)fs.f_type == RAMFS_MAGIC))
        return PCOW_PERSISTENCE_VOLATILE;
    /*
     * The kernel refuses MAP_SYNC with EOPNOTSUPP unless the file is on DAX, so success is the
     * proof.
     */
    probe = mmap(NULL, PCOW_PAGE_SIZE, PROT_READ, MAP_SHARED_VALIDATE | MAP_SYNC, fd, 0);
    if (probe == MAP_FAILED)
        return PCOW_PERSISTENCE_PAGE_CACHE;
    munmap(probe, PCOW_PAGE_SIZE);
    return PCOW_PERSISTENCE_PMEM;
}

static void flush(const struct persist *persist, const void *address, size_t length)
{
    persist_observe(persist, (struct observation){
                                 .what = OBSERVED_FLUSH, .address = address, .length = length});
    persist->flush_lines(address, length);
}

static int sync_pages(struct persist *persist, const void *address, size_t length)
{
    uintptr_t page = (uintptr_t)address & ~(uintptr_t)(PCOW_PAGE_SIZE - 1);
    int ret = persist_observe(
        persist,
        (struct observation){.what = OBSERVED_MSYNC, .address = address, .length = length});
    struct request request;

    if (ret) {
        failures_add(&persist->failures);
        return ret;
    }
    request = failures_begin(&persist->failures);
    ret = msync((void *)page, (uintptr_t)address + length - page, MS_SYNC) ? -errno : 0;
    failures_end(&persist->failures, &request, ret != 0);
    return ret;
}

int persist_range(struct persist *persist, const void *address, size_t length)
{
    switch (persist->persistence) {
    case PCOW_PERSISTENCE_PMEM:
        flush(persist, address, length);
        persist_fence(persist);
        return 0;
    case PCOW_PERSISTENCE_PAGE_CACHE:
        return sync_pages(persist, address, length);
    case PCOW_PERSISTENCE_VOLATILE:
        break;
    }
    __atomic_signal_fence(__ATOMIC_SEQ_CST);
    return 0;
}

void persist_fence(const struct persist *persist)
{
    if (persist->persistence == PCOW_PERSISTENCE_PMEM) {
        persist_observe(persist, (struct observation){.what = OBSERVED_FENCE});
        _mm_sfence();
    }
    /* Elsewhere x86 keeps the order of stores by itself; only the compiler must. */
    __atomic_signal_fence(__ATOMIC_SEQ_CST);
}

void persist_word(const struct persist *persist, uint64_t *where, uint64_t value)
{
    persist_observe(persist, (struct observation){.what = OBSERVED_STORE,
                                                  .address = where,
                                                  .length = sizeof value,
                                                  .from = &value});
    __atomic_store_n(where, value, __ATOMIC_RELEASE);
}

bool persist_word_if(const struct persist *persist, uint64_t *where, uint64_t expected,
                     uint64_t value)
{
    if (__atomic_load_n(where, __ATOMIC_ACQUIRE) != expected)
        return false;
    persist_observe(persist, (struct observation){.what = OBSERVED_STORE,
                                                  .address = where,
                                                  .length = sizeof value,
                                                  .from = &value});
    return __atomic_compare_exchange_n(where, &expected, value, false, __ATOMIC_SEQ_CST,
                                       __ATOMIC_RELAXED);
}

void persist_bytes(const struct persist *persist, void *where, const void *from, size_t length)
{
    persist_observe(persist,
                    (struct observation){
                        .what = OBSERVED_COPY, .address = where, .length = length, .from = from});
    memcpy(where, from, length);
}

int persist_copy(const struct persist *persist, void *to, const void *from, size_t length)
{
    bool pmem = persist->persistence == PCOW_PERSISTENCE_PMEM;
    int ret;

    persist_observe(
        persist,
        (struct observation){.what = OBSERVED_COPY, .address = to, .length = length, .from = from});
    if ((!pmem && length < LARGE_COPY) || (uintptr_t)to % 16 || (uintptr_t)from % 16
        || length % CACHE_LINE) {
        ret = copy_bytes(to, from, length);
        if (pmem && ret == 0)
            flush(persist, to, length);
        return ret;
    }
    if (pmem)
        persist_observe(
            persist, (struct observation){.what = OBSERVED_FLUSH, .address = to, .length = length});
    ret = copy_past_caches(to, from, length);
    /*
     * Elsewhere nobody fences later, and these stores are the only ones that x86 does not keep in
     * order.
     */
    if (!pmem)
        _mm_sfence();
    return ret;
}
