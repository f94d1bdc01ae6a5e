/* SPDX-License-Identifier: BSD-3-Clause */
#ifndef SHIM_CONFIG_VERSION_H
#define SHIM_CONFIG_VERSION_H

/* As the UAPI group's Version Format Specification orders versions: like strcmp(). */
int version_compare(const char *a, const char *b);

#endif
