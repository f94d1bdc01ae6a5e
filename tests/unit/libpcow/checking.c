/* SPDX-License-Identifier: BSD-3-Clause */
#include "checking.h"

#include <stdio.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "check/check.h"

#define IMAGE scratch("image.pcow")

void add_finding(void *opaque, enum pcow_finding_kind kind, const char *message)
{
    struct findings *findings = opaque;
    size_t used = strlen(findings->text);

    (void)kind;
    snprintf(findings->text + used, sizeof findings->text - used, "%s\n", message);
}

struct pcow_check_result check_image(unsigned flags, struct findings *findings)
{
    struct pcow_check_result result;

    findings->text[0] = 0;
    MUST(pcow_check(IMAGE, flags, add_finding, findings, &result, &error));
    return result;
}

struct killer {
    struct observer observer;
    unsigned left;
};

static int kill_at(struct observer *observer, const struct observation *observation)
{
    struct killer *killer = (struct killer *)observer;

    (void)observation;
    if (killer->left-- == 0)
        _exit(1);
    return 0;
}

bool repair_until(unsigned step)
{
    struct killer killer = {.observer = {.look = kill_at}, .left = step};
    int status;
    pid_t child = fork();

    assert_true(child >= 0);
    if (child == 0) {
        struct pcow_check_result result;
        struct pcow_error error;

        _exit(
            check_file(&(struct check_request){.path = IMAGE,
                                               .flags = PCOW_CHECK_REPAIR | PCOW_CHECK_ACCEPT_LOSS,
                                               .result = &result,
                                               .error = &error,
                                               .observer = &killer.observer})
                ? 2
                : 0);
    }
    assert_int_equal(waitpid(child, &status, 0), child);
    assert_true(WIFEXITED(status) && WEXITSTATUS(status) < 2);
    return WEXITSTATUS(status) == 1;
}
