/* SPDX-License-Identifier: GPL-2.0-or-later */
/*
 * Disks that a VM only reads take no part in its checkpoints, but what was
 * asked of them must have ended before the VM stands still: an answer that
 * comes later would be stored behind the checkpoint.  Stopping a VM waits for
 * that as long as it takes.  A checkpoint does not wait for a slow disk:
 *
 *   guest   what is done                        at the limit
 *   ------  ----------------------------------  -----------------------------
 *   runs    wait for a moment without requests  go on below, as a disk that is
 *                                               fast may always have some
 *   stands  wait until the last one has ended   refused; the guest runs on
 *
 * What an iothread has not looked at yet when the vCPUs stand is begun by
 * stopping the VM, which waits for it.
 */
#include "qemu/osdep.h"
#include "block/aio-wait.h"
#include "block/block-global-state.h"
#include "block/block_int-common.h"
#include "migration/pcow/checkpoint.h"
#include "qapi/error.h"
#include "qemu/main-loop.h"
#include "qemu/timer.h"
#include "system/cpus.h"
#include "system/runstate.h"

#define ROUNDS 16               /* of a main loop in which devices are at work */

bool checkpoint_disks_are_busy(void)
{
    BlockDriverState *bs = NULL;

    while ((bs = bdrv_next_all_states(bs))) {
        if (qatomic_read(&bs->in_flight)) {
            return true;
        }
    }
    return false;
}

static void set_expired(void *opaque)
{
    bool *expired = opaque;

    *expired = true;
}

bool checkpoint_await_disks(uint32_t limit_ms, Error **errp)
{
    AioContext *context = qemu_get_aio_context();
    bool expired = false;
    QEMUTimer *timer;

    if (!runstate_is_running()) {
        return true;            /* what the guest asked for ended as it stopped */
    }
    pause_all_vcpus();
    /* What it has asked for, and no device has looked at yet, begins now. */
    for (int round = 0; round < ROUNDS && aio_poll(context, false); round++) {
    }
    if (!checkpoint_disks_are_busy()) {
        return true;
    }
    timer = aio_timer_new(context, QEMU_CLOCK_REALTIME, SCALE_MS,
                          set_expired, &expired);
    timer_mod(timer, qemu_clock_get_ms(QEMU_CLOCK_REALTIME) + limit_ms);
    /* The requests end in the main loop, or tell it that they have */
    AIO_WAIT_WHILE_UNLOCKED(NULL, checkpoint_disks_are_busy() && !expired);
    timer_free(timer);
    if (!checkpoint_disks_are_busy()) {
        return true;            /* and the vCPUs stand: nobody asks for more */
    }
    resume_all_vcpus();
    error_setg(errp, "a disk has not ended its requests in %" PRIu32 " ms: the "
               "VM has run on, and nothing was changed. Try again when its "
               "disks are faster, or give it more time", limit_ms);
    return false;
}
