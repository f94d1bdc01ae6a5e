/* SPDX-License-Identifier: BSD-3-Clause */
#ifndef PCOW_NBD_PEER_H
#define PCOW_NBD_PEER_H

#include <stdbool.h>
#include <stdint.h>

/*
 * Whether a process runs under this profile of AppArmor, in whatever mode. AppArmor of many kernels
 * (Debian's Linux 6.1) does not see who connects to a socket that has a path, and all QEMUs of a
 * host are one user: the server has to look itself.
 */
bool peer_is_confined_by(int64_t pid, const char *profile);

#endif
