/* SPDX-License-Identifier: BSD-3-Clause */
#include "machine/console.h"

#include <poll.h>
#include <stdio.h>
#include <termios.h>
#include <time.h>
#include <unistd.h>

#define ASK_MILLISECONDS 60000
#define SHOWN_MAX 40

static void set_mode(bool keys)
{
    struct termios mode;

    if (tcgetattr(STDIN_FILENO, &mode) != 0)
        return;
    if (keys)
        mode.c_lflag &= ~(tcflag_t)(ICANON | ECHO);
    else
        mode.c_lflag |= ICANON | ECHO;
    tcsetattr(STDIN_FILENO, TCSANOW, &mode);
}

void console_open(void)
{
    set_mode(true);
    tcflush(STDIN_FILENO, TCIFLUSH);
}

void console_close(void)
{
    set_mode(false);
}

long console_clock(void)
{
    struct timespec now;

    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * 1000 + now.tv_nsec / 1000000;
}

bool console_key(long milliseconds)
{
    struct pollfd input = {.fd = STDIN_FILENO, .events = POLLIN};

    return poll(&input, 1, milliseconds > 0 ? (int)milliseconds : 0) == 1
           && (input.revents & POLLIN);
}

size_t console_ask(const struct menu *menu)
{
    size_t number = 0, digits = 0;
    char key;

    /* the one that showed the menu */
    while (console_key(0) && read(STDIN_FILENO, &key, 1) == 1)
        ;
    printf("\n");
    for (size_t i = 0; i < menu->count && i < SHOWN_MAX; i++)
        printf("%s%3zu  %s\n", i == menu->chosen ? "*" : " ", i + 1, menu->items[i].title);
    if (menu->count > SHOWN_MAX)
        printf("      and %zu more\n", menu->count - SHOWN_MAX);
    printf("Number, then Enter; Enter alone for the one with the star: ");
    fflush(stdout);
    while (console_key(ASK_MILLISECONDS) && read(STDIN_FILENO, &key, 1) == 1) {
        if (key >= '0' && key <= '9' && digits < 4) {
            number = number * 10 + (size_t)(key - '0');
            digits++;
            printf("%c", key);
        } else if ((key == '\b' || key == 0x7f) && digits) {
            number /= 10;
            digits--;
            printf("\b \b");
        } else if (key == '\r' || key == '\n') {
            printf("\n");
            if (!digits)
                return menu->chosen;
            if (number >= 1 && number <= menu->count)
                return number - 1;
            printf("There is no %zu. Number: ", number);
            number = digits = 0;
        }
        fflush(stdout);
    }
    printf("\n");
    return menu->chosen;
}
