/* SPDX-License-Identifier: BSD-3-Clause */
/* A grub.cfg as it runs: variables, functions, the menu that it makes. */
#ifndef SHIM_SCRIPT_SCRIPT_H
#define SHIM_SCRIPT_SCRIPT_H

#include "config/bls.h"
#include "config/menu.h"
#include "script/parse.h"

#define SOURCES_MAX 16 /* files and texts within one another */
#define VARIABLES_MAX 1024
#define SAVES_MAX 64
#define SUBMENUS_MAX 8 /* in one another */
#define NAME_MAX_LENGTH 255

struct variable {
    struct variable *next;
    const char *name;
    const char *value; /* NULL: unset */
};

struct function {
    struct function *next;
    const char *name;
    const struct node *block;
};

/* "menuentry" or "submenu", or an entry of the Boot Loader Specification. */
struct script_entry {
    struct script_entry *next, *parent;
    const char *title, *id;
    const struct node *block;
    const struct bls_entry *bls;
    bool submenu;
    struct script_entry *children; /* of a submenu, once it was opened */
    size_t argc;
    char **argv; /* $1... while its block runs */
};

enum flow { FLOW_ON, FLOW_BREAK, FLOW_CONTINUE, FLOW_RETURN, FLOW_EXIT };

struct script {
    struct arena *arena;
    const struct volumes *volumes;
    struct variable *variables;
    size_t variables_count, functions_count;
    struct function *functions;
    struct script_entry *entries, **last_entry; /* of the menu that is being made */
    size_t entries_count;
    struct save *saves;
    size_t saves_count;
    struct choice *choice; /* what linux and initrd fill; NULL before an entry runs */
    const char *foreign; /* command of the entry that boots something else */
    struct failure *failure; /* of linux and initrd */
    size_t argc; /* of the function or the entry that runs */
    char **argv;
    int status; /* of the last command */
    enum flow flow;
    unsigned loops; /* around the command */
    unsigned depth, sources;
    unsigned errors; /* of syntax */
};

void script_open(struct script *script, struct arena *arena, const struct volumes *volumes);
/* Run a text, or what was read of one. */
void script_run_text(struct script *script, const char *text, size_t length);
void script_run(struct script *script, const struct node *list);
/* Run a file of GRUB's path; 1 if there is none. */
int script_run_file(struct script *script, const char *path);

/* NULL if it is not set. */
const char *script_find(const struct script *script, const char *name);
/* "" if it is not set. */
const char *script_get(const struct script *script, const char *name);
void script_set(struct script *script, const char *name, const char *value);

/* "(hd0,gpt1)/boot/x", or a path on $root. NULL if there is no such device. */
const struct volume *script_path(const struct script *script, const char *path, const char **rest);

/* Words of a command with their variables. */
size_t script_expand(struct script *script, const struct word *words, char ***argv);

/* Run a command that is no function; -1 if there is none of that name. */
int script_command(struct script *script, size_t argc, char **argv, const struct node *node);
int script_test(struct script *script, size_t argc, char **argv);
int script_search(struct script *script, size_t argc, char **argv);
int script_probe(struct script *script, size_t argc, char **argv);
int script_load_env(struct script *script, size_t argc, char **argv);
int script_save_env(struct script *script, size_t argc, char **argv);
int script_menuentry(struct script *script, size_t argc, char **argv, const struct node *node);
int script_blscfg(struct script *script);
/* NULL if there is no such entry; submenus must have been opened. */
const struct menu_item *script_default(const struct script *script, const struct menu *menu,
                                       const char *name);
int script_linux(struct script *script, size_t argc, char **argv);
int script_initrd(struct script *script, size_t argc, char **argv);

#endif
