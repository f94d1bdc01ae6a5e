/* SPDX-License-Identifier: BSD-3-Clause */
/*
 * Who loads and stores: threads, each in pages of its own, and handlers in them. Only a store may
 * fail, and only for want of space.
 */
#include "world.h"

#include <errno.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

/* Of so many accesses one is a system call's, if any are. */
#define EACH_CALL 16u

/* An access that may fail, of this thread. */
struct access {
    sigjmp_buf failed;
    const volatile void *at;
    bool store;
    struct access *outer;              /* that a handler has interrupted */
};

static _Thread_local struct access *volatile current;
static _Thread_local struct guest *this_guest;

static void handle_bus(int number, siginfo_t *info, void *context)
{
    struct access *access = current;

    if (pcow_serve_sigbus(info, context)) {
        sigset_t mask;

        /* A tick in between would load from the image, and a trap end the process. */
        sigprocmask(SIG_BLOCK, NULL, &mask);
        if (sigismember(&mask, SIGBUS) && !sigismember(&mask, SIGUSR1))
            wrong(current_world, "a handler may run while SIGBUS is blocked");
        return;
    }
    if (access && access->store && info->si_code == SI_QUEUE && info->si_errno == ENOSPC
        && current_world->policy == PCOW_FULL_FAIL)
        siglongjmp(access->failed, 1);
    wrong(current_world, "signal %d at %p (guest offset %lld), code %d, errno %d, %s", number,
          info->si_addr, (long long)((uint8_t *)info->si_addr - current_world->memory),
          info->si_code, info->si_errno,
          !access         ? "in no access of a guest"
          : access->store ? "in a store"
                          : "in a load");
}

/* False: no space. */
static bool store(uint8_t *at, uint64_t value)
{
    struct access access = {.at = at, .store = true, .outer = current};
    bool stored = false;

    if (!sigsetjmp(access.failed, 1)) {
        current = &access;
        *(volatile uint64_t *)at = value;
        stored = true;
    }
    current = access.outer;
    return stored;
}

static uint64_t load(const uint8_t *at)
{
    struct access access = {.at = at, .outer = current};
    uint64_t value;

    current = &access;
    value = *(const volatile uint64_t *)at;
    current = access.outer;
    return value;
}

static void store_and_note(struct world *world, uint64_t at, uint64_t value)
{
    if (store(world->memory + at, value)) {
        memcpy(world->bytes + at, &value, sizeof value);
        atomic_fetch_add(&figures.stores, 1);
    } else {
        atomic_fetch_add(&figures.refused, 1);
    }
}

static void store_by_call(struct guest *guest, uint64_t at, uint64_t value)
{
    struct world *world = guest->world;

    if (call_store(world, &guest->call, at, value)) {
        memcpy(world->bytes + at, &value, sizeof value);
        atomic_fetch_add(&figures.by_calls, 1);
    } else {
        atomic_fetch_add(&figures.refused, 1);
    }
}

static void load_and_compare(struct world *world, uint64_t at)
{
    uint64_t found = load(world->memory + at), expected;

    memcpy(&expected, world->bytes + at, sizeof expected);
    atomic_fetch_add(&figures.loads, 1);
    if (found != expected)
        wrong(world, "the guest loads %016llx at slab %llu page %llu byte %llu, not %016llx",
              (unsigned long long)found, (unsigned long long)(at / PCOW_SLAB_SIZE),
              (unsigned long long)(at / PAGE % PAGES_PER_SLAB), (unsigned long long)(at % PAGE),
              (unsigned long long)expected);
}

/* A page of this share in the slab. */
static uint64_t page_in(uint64_t slab, uint64_t *seed, unsigned share)
{
    return slab * PCOW_SLAB_SIZE + (below(seed, PAGES_PER_SLAB / SHARES) * SHARES + share) * PAGE;
}

static void handle_tick(int number)
{
    struct guest *guest = this_guest;
    int saved_errno = errno;

    (void)number;
    if (!guest)
        return;
    /* Either this is seen by who forbids it, or that here. */
    atomic_fetch_add(&guest->in_handlers, 1);
    if (atomic_load(&guest->takes_signals)) {
        uint64_t seed = guest->handler_seed;
        uint64_t at = page_in(guest->at / PCOW_SLAB_SIZE, &seed, SHARES - 1 - guest->number)
                      + below(&seed, PAGE / 8) * 8;

        load_and_compare(guest->world, at);
        store_and_note(guest->world, at, random_next(&seed));
        guest->handler_seed = seed;
        atomic_fetch_add(&figures.handled, 1);
    }
    atomic_fetch_sub(&guest->in_handlers, 1);
    errno = saved_errno;
}

void guests_install_handlers(void)
{
    struct sigaction bus = {.sa_sigaction = handle_bus, .sa_flags = SA_SIGINFO | SA_NODEFER},
                     tick = {.sa_handler = handle_tick, .sa_flags = SA_RESTART};

    sigemptyset(&bus.sa_mask);
    sigemptyset(&tick.sa_mask);
    sigaction(SIGBUS, &bus, NULL);
    sigaction(SIGUSR1, &tick, NULL);
}

static unsigned own_share(struct guest *guest)
{
    /* Every page but those of handlers. */
    return (unsigned)below(&guest->seed, (SHARES - GUESTS) / GUESTS) * GUESTS + guest->number;
}

void guest_run(struct guest *guest)
{
    struct world *world = guest->world;
    uint64_t slab = guest->focus < world->slabs ? guest->focus : below(&guest->seed, world->slabs),
             at = page_in(slab, &guest->seed, own_share(guest));

    this_guest = guest;
    for (unsigned i = 0; i < guest->accesses; i++) {
        if (!guest->sequential) {
            slab = guest->focus < world->slabs ? guest->focus : below(&guest->seed, world->slabs);
            at = page_in(slab, &guest->seed, own_share(guest));
        } else {
            at += GUESTS * PAGE;
            if (at / PAGE % SHARES >= SHARES - GUESTS)
                at += GUESTS * PAGE;
            if (at >= world->size)
                at = guest->number * PAGE;
        }
        guest->at = at;
        at = at / PAGE * PAGE + below(&guest->seed, PAGE / 8) * 8;
        if (world->asks && below(&guest->seed, EACH_CALL) == 0)
            store_by_call(guest, at, random_next(&guest->seed));
        else if (below(&guest->seed, 3))
            store_and_note(world, at, random_next(&guest->seed));
        else
            load_and_compare(world, at);
        atomic_fetch_add(&guest->reached, 1);
        atomic_fetch_add(&world->progress, 1);
    }
}

static void *run(void *opaque)
{
    static const struct timespec moment = {0, 50000};
    struct guest *guest = opaque;
    unsigned done = 0;

    this_guest = guest;
    while (!atomic_load(&guest->world->stop)) {
        if (atomic_load(&guest->turn) == done) {
            nanosleep(&moment, NULL);
            continue;
        }
        guest_run(guest);
        atomic_store(&guest->done, ++done);
    }
    return NULL;
}

void guest_start(struct guest *guest)
{
    atomic_store(&guest->turn, 0);
    atomic_store(&guest->done, 0);
    guest_take_signals(guest, true);
    call_begin(&guest->call);
    this_guest = NULL;
    if (guest->number == 0) {
        this_guest = guest;
        guest->thread = pthread_self();
    } else if (pthread_create(&guest->thread, NULL, run, guest)) {
        wrong(guest->world, "no thread");
    }
}

void guest_end(struct guest *guest)
{
    if (guest->number > 0)
        pthread_join(guest->thread, NULL);
    else
        this_guest = NULL;
    call_end(&guest->call);
}

void guest_ask(struct guest *guest, unsigned accesses)
{
    guest->accesses = accesses;
    if (guest->number == 0) {
        guest_run(guest);
        return;
    }
    atomic_fetch_add(&guest->turn, 1);
}

void guest_await(struct guest *guest)
{
    static const struct timespec moment = {0, 50000};

    while (guest->number > 0 && atomic_load(&guest->done) != atomic_load(&guest->turn))
        nanosleep(&moment, NULL);
}

void guest_take_signals(struct guest *guest, bool take)
{
    static const struct timespec moment = {0, 50000};

    atomic_store(&guest->takes_signals, take);
    while (!take && atomic_load(&guest->in_handlers))
        nanosleep(&moment, NULL);
}
