/* SPDX-License-Identifier: BSD-3-Clause */
/* The two handlers of the paper's image monitor. */
#include <errno.h>
#include <signal.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "paper_state.h"
#include "report.h"
#include "uffd.h"

#define WHOLE UINT32_MAX

/*
 * A signal handler has no other way to its state: the paper's method that is being measured, and
 * who had SIGSEGV before.
 */
static struct paper *active;
static struct sigaction previous;

static void note(struct paper *paper, int failure)
{
    int none = 0;

    __atomic_compare_exchange_n(&paper->failure, &none, failure, false, __ATOMIC_ACQ_REL,
                                __ATOMIC_ACQUIRE);
}

static void claim(struct paper *paper, uint64_t cluster)
{
    while (__atomic_exchange_n(&paper->claim[cluster], 1, __ATOMIC_ACQUIRE)) {
        __builtin_ia32_pause();
    }
}

static void release(struct paper *paper, uint64_t cluster)
{
    __atomic_store_n(&paper->claim[cluster], 0, __ATOMIC_RELEASE);
}

/*
 * Copy length bytes at address to the file and let them take the place (algorithms 3 and 4 share
 * this).
 */
static int copy_over(struct paper *paper, uint8_t *address, uint64_t length, uint64_t offset)
{
    uint8_t *temporary = paper_map_file(paper, NULL, length, offset, true);

    if (temporary == MAP_FAILED) {
        return -errno;
    }
    memcpy(temporary, address, length);
    bench_persist(paper->bench, temporary, length);
    return 0
           - (mremap(temporary, length, length, MREMAP_MAYMOVE | MREMAP_FIXED, address)
                      == MAP_FAILED
                  ? errno
                  : 0);
}

static int copy_cluster(struct paper *paper, uint64_t cluster)
{
    uint64_t offset;
    int r = paper_new_cluster(paper, cluster, &offset);

    r = r ? r
          : copy_over(paper, paper->memory + cluster * paper->options.cluster_size,
                      paper->options.cluster_size, offset);
    if (!r) {
        paper->bitmap[cluster] = WHOLE;
    }
    return r;
}

static int copy_page(struct paper *paper, uint64_t cluster, uint64_t page)
{
    uint64_t offset = paper->offset[cluster],
             in_cluster = page * PCOW_PAGE_SIZE - cluster * paper->options.cluster_size;
    uint32_t bit = UINT32_C(1) << (in_cluster / PCOW_PAGE_SIZE % 32);
    int r = 0;

    if (paper->bitmap[cluster] & bit) {
        return 0;
    }
    if (!offset) {
        r = paper_new_cluster(paper, cluster, &offset);
    }
    r = r ? r
          : copy_over(paper, paper->memory + page * PCOW_PAGE_SIZE, PCOW_PAGE_SIZE,
                      offset + in_cluster);
    if (!r) {
        paper_store_bitmap(paper, cluster, paper->bitmap[cluster] | bit);
    }
    return r;
}

static void handle_signal(int number, siginfo_t *info, void *context)
{
    struct paper *paper = __atomic_load_n(&active, __ATOMIC_ACQUIRE);
    uint8_t *address = info->si_addr;
    int saved_errno = errno, r = 0;
    uint64_t cluster;

    (void)context;
    if (!paper || address < paper->memory || address >= paper->memory + paper->options.size) {
        /* not ours: the instruction runs again and ends the process */
        signal(number, SIG_DFL);
        return;
    }
    cluster = (uint64_t)(address - paper->memory) / paper->options.cluster_size;
    claim(paper, cluster);
    if (paper->bitmap[cluster] != WHOLE) {
        r = paper->options.fine_grained
                ? copy_page(paper, cluster, (uint64_t)(address - paper->memory) / PCOW_PAGE_SIZE)
                : copy_cluster(paper, cluster);
    }
    release(paper, cluster);
    if (r) {
        /*
         * The store cannot be served; let it go somewhere, so that the thread comes to its end, and
         * say so afterwards.
         */
        note(paper, r);
        if (mmap(paper->memory, paper->options.size, PROT_READ | PROT_WRITE,
                 MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0)
            == MAP_FAILED) {
            signal(number, SIG_DFL);
        }
    }
    errno = saved_errno;
}

/* Algorithm 2. */
static int expand(struct paper *paper, uint64_t cluster)
{
    uint64_t offset;
    int r = paper_new_cluster(paper, cluster, &offset);

    if (!r
        && paper_map_file(paper, paper->memory + cluster * paper->options.cluster_size,
                          paper->options.cluster_size, offset, true)
               == MAP_FAILED) {
        r = -errno;
    }
    if (!r) {
        paper->bitmap[cluster] = WHOLE;
    }
    return r;
}

static void *serve(void *opaque)
{
    struct paper *paper = opaque;
    uint8_t *address;

    while ((address = bench_uffd_wait(paper->uffd))) {
        uint64_t cluster = (uint64_t)(address - paper->memory) / paper->options.cluster_size;
        int r = 0;

        if (address == paper->stop_page) {
            bench_uffd_zero_page(paper->uffd, address);
            return NULL;
        }
        if (!paper->offset[cluster]) {
            r = expand(paper, cluster);
        }
        if (r) {
            note(paper, r);
            bench_uffd_zero_page(paper->uffd, address);
        }
        bench_uffd_wake(paper->uffd, paper->memory + cluster * paper->options.cluster_size,
                        paper->options.cluster_size);
    }
    return NULL;
}

static int start_uffd(struct paper *paper)
{
    int r;

    paper->uffd = bench_uffd_open();
    if (paper->uffd < 0) {
        r = paper->uffd;
        paper->uffd = -1;
        return r;
    }
    paper->stop_page =
        mmap(NULL, PCOW_PAGE_SIZE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (paper->stop_page == MAP_FAILED) {
        paper->stop_page = NULL;
        return -ENOMEM;
    }
    r = bench_uffd_register(paper->uffd, paper->memory, paper->options.size);
    r = r ? r : bench_uffd_register(paper->uffd, paper->stop_page, PCOW_PAGE_SIZE);
    r = r ? r : -pthread_create(&paper->thread, NULL, serve, paper);
    if (r) {
        munmap(paper->stop_page, PCOW_PAGE_SIZE);
        paper->stop_page = NULL;
    }
    return r;
}

int paper_start_handlers(struct paper *paper, struct pcow_error *error)
{
    struct sigaction action = {.sa_sigaction = handle_signal,
                               .sa_flags = SA_SIGINFO | SA_ONSTACK | SA_NODEFER};
    int r = paper->options.base ? 0 : start_uffd(paper);

    if (r) {
        return fail(error, r, "the paper's method needs userfaultfd: %s", strerror(-r));
    }
    __atomic_store_n(&active, paper, __ATOMIC_RELEASE);
    sigemptyset(&action.sa_mask);
    if (sigaction(SIGSEGV, &action, &previous)) {
        return fail(error, -errno, "cannot set a SIGSEGV handler: %s", strerror(errno));
    }
    paper->handler = true;
    return 0;
}

void paper_stop_handlers(struct paper *paper)
{
    if (paper->handler) {
        sigaction(SIGSEGV, &previous, NULL);
    }
    __atomic_store_n(&active, NULL, __ATOMIC_RELEASE);
    if (paper->stop_page) {
        /* The thread sits in a blocking read; a fault on a page that it knows is what ends it. */
        *(volatile uint8_t *)paper->stop_page;
        pthread_join(paper->thread, NULL);
        munmap(paper->stop_page, PCOW_PAGE_SIZE);
    }
    if (paper->uffd >= 0) {
        close(paper->uffd);
    }
}
