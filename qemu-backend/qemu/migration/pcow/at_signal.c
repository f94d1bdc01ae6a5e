/* SPDX-License-Identifier: GPL-2.0-or-later */
/*
 * The last moment of a VM whose QEMU is told to end, by SIGTERM, SIGINT, SIGHUP
 * or SIGPWR, as a checkpoint: a host that goes down takes nothing from it.
 *
 * QEMU learns of the signal in its main loop, and then tells who wants to know,
 * before it takes anything apart.  The VM is stopped there, so that it stores
 * nothing behind the checkpoint, and its main loop goes on for the checkpoint
 * alone until that is durable.
 */
#include "qemu/osdep.h"
#include "block/aio-wait.h"
#include "migration/pcow/checkpoint.h"
#include "qapi/error.h"
#include "qapi/qapi-commands-pcow.h"
#include "qemu/coroutine.h"
#include "qemu/error-report.h"
#include "qemu/main-loop.h"
#include "system/runstate.h"

#define ROUNDS 16               /* of a main loop in which devices are at work */

typedef struct Last {
    char *name;
    PcowCheckpointCreated *created;
    Error *err;
    bool done;
} Last;

/* UTC, to the millisecond, as pcow_driver names those that it takes. */
static char *name_of_now(const char *prefix)
{
    g_autoptr(GDateTime) now = g_date_time_new_now_utc();
    g_autofree char *date = g_date_time_format(now, "%Y%m%dT%H%M%S");

    return g_strdup_printf("%s%s%03dZ", prefix, date,
                           g_date_time_get_microsecond(now) / 1000);
}

static void coroutine_fn co_take(void *opaque)
{
    Last *last = opaque;

    last->created = qmp_pcow_checkpoint_create(last->name, false, 0, &last->err);
    last->done = true;
    aio_wait_kick();
}

/* One that was asked for before comes to its end, or is refused. */
static void wait_for_others(void)
{
    AioContext *context = qemu_get_aio_context();

    /* What was just asked for begins, which takes some rounds */
    for (int round = 0; round < ROUNDS && aio_poll(context, false); round++) {
    }
    while (checkpoint_is_under_way()) {
        aio_poll(context, true);
    }
}

/*
 * One that the guest cannot go on from, has lost a store of, or goes on from
 * elsewhere: a VM that was migrated away would run twice.
 */
static bool is_no_moment(void)
{
    return runstate_needs_reset() || runstate_check(RUN_STATE_GUEST_PANICKED) ||
           runstate_check(RUN_STATE_IO_ERROR) ||
           runstate_check(RUN_STATE_FINISH_MIGRATE) ||
           runstate_check(RUN_STATE_POSTMIGRATE);
}

void checkpoint_take_at_signal(void)
{
    const char *prefix = checkpoint_last_prefix();
    Last last = {};

    if (!prefix) {
        return;
    }
    wait_for_others();
    if (is_no_moment()) {
        warn_report("no checkpoint at the end of QEMU, as the VM is in state "
                    "%s", RunState_str(runstate_get()));
        return;
    }
    if (runstate_is_running()) {
        vm_stop(RUN_STATE_PAUSED);
    }
    wait_for_others();
    last.name = name_of_now(prefix);
    qemu_coroutine_enter(qemu_coroutine_create(co_take, &last));
    AIO_WAIT_WHILE_UNLOCKED(NULL, !last.done);
    if (last.created) {
        info_report("the last moment of the VM is checkpoint '%s'", last.name);
    } else {
        error_reportf_err(last.err, "no checkpoint '%s' at the end of QEMU: ",
                          last.name);
    }
    qapi_free_PcowCheckpointCreated(last.created);
    g_free(last.name);
}

static void end_at_signal(int number, siginfo_t *info, void *context)
{
    qemu_system_killed(info->si_signo, info->si_pid);
}

void qmp_pcow_checkpoint_at_signal(const char *wanted, Error **errp)
{
    /* Others end QEMU in an orderly way without our doing. */
    const struct sigaction power = {
        .sa_sigaction = end_at_signal,
        .sa_flags = SA_SIGINFO,
    };
    g_autofree char *name = NULL;

    if (wanted) {
        name = g_strdup_printf("%s00000000T000000000Z", wanted);
        if (!checkpoint_home(errp) || !hostmem_pcow_all_check_name(name, errp)) {
            return;
        }
        sigaction(SIGPWR, &power, NULL);
    }
    checkpoint_set_last(wanted);
}
