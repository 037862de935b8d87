/*
 * demo: requests move from a prefill process to a decode process, and come out as if they had never moved.
 *
 *   demo [--requests N]   runs single, prefill and decode, from the directory that demo itself is in
 *
 * Every token, and every bit of every logit, must equal those of `single`, which computes the same requests in one
 * process. Exits with 0 only then.
 */
#define _GNU_SOURCE

#include "model.h"
#include "request.h"

#include <errno.h>
#include <limits.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

enum { SINGLE_TIMEOUT_S = 300, RUN_TIMEOUT_S = 300, KILL_TIMEOUT_S = 5 };

/* What every page and every request of a model weighs, to compare with what the library counted. */
enum {
    PAGE_BYTES = 2 * MODEL_ATTENTION_LAYERS * MODEL_PAGE_FLOATS * sizeof(float),
    STATE_BYTES = (MODEL_WINDOW_FLOATS + MODEL_RECURRENCE_FLOATS) * sizeof(float),
    AUX_BYTES = 16 + MODEL_VOCAB * sizeof(float)
};

typedef struct child {
    const char *name;
    pid_t pid; /* 0: not running */
    int succeeded;
} child_t;

typedef struct paths {
    char programs[PATH_MAX];
    char directory[PATH_MAX]; /* "": not made yet */
    char socket[PATH_MAX];
    char expected[PATH_MAX];
    char moved[PATH_MAX];
} paths_t;

/* ---- processes ---- */

/* Starts a program. It dies with this process, and starts with the usual signals. 0, or -1. */
static int start(child_t *child, const paths_t *paths, const char *name, char *const *arguments, const sigset_t *mask) {
    char path[PATH_MAX];
    *child = (child_t){.name = name};
    if (snprintf(path, sizeof path, "%s/%s", paths->programs, name) >= (int)sizeof path) {
        fprintf(stderr, "demo: the path is too long\n");
        return -1;
    }
    pid_t parent = getpid();
    pid_t pid = fork();
    if (pid < 0) {
        perror("demo: fork");
        return -1;
    }
    if (pid == 0) {
        if (prctl(PR_SET_PDEATHSIG, SIGKILL) == 0 && getppid() == parent &&
            sigprocmask(SIG_SETMASK, mask, NULL) == 0) {
            execv(path, arguments);
            perror(path);
        }
        _exit(127);
    }
    child->pid = pid;
    return 0;
}

/* Notes a child's end, if it has ended. */
static void reap(child_t *child) {
    int status;
    if (child->pid == 0 || waitpid(child->pid, &status, WNOHANG) != child->pid) {
        return;
    }
    child->pid = 0;
    child->succeeded = WIFEXITED(status) && WEXITSTATUS(status) == 0;
    if (WIFSIGNALED(status)) {
        fprintf(stderr, "demo: %s was killed by signal %d\n", child->name, WTERMSIG(status));
    } else if (!child->succeeded) {
        fprintf(stderr, "demo: %s exited with %d\n", child->name, WEXITSTATUS(status));
    }
}

/* Waits until a child ends or somebody wants this process to end. 1: goes on, 0: time is up, -1: interrupted. */
static int await_signal(const sigset_t *signals, uint64_t deadline_ns) {
    uint64_t now = now_ns();
    uint64_t left = now >= deadline_ns ? 0 : deadline_ns - now;
    struct timespec timeout = {.tv_sec = (time_t)(left / 1000000000u), .tv_nsec = (long)(left % 1000000000u)};
    int signal = sigtimedwait(signals, NULL, &timeout);
    if (signal == SIGCHLD || (signal < 0 && errno == EINTR)) {
        return 1;
    }
    return signal < 0 ? 0 : -1;
}

static void signal_children(const child_t *children, uint32_t num, int signal) {
    for (uint32_t i = 0; i < num; i++) {
        if (children[i].pid != 0) {
            kill(children[i].pid, signal);
        }
    }
}

/* Waits for all children; one that fails ends the wait. 0: all have succeeded. */
static int wait_children(child_t *children, uint32_t num, const sigset_t *signals, uint32_t timeout_s) {
    uint64_t deadline = now_ns() + timeout_s * 1000000000ull;
    for (;;) {
        uint32_t num_succeeded = 0;
        for (uint32_t i = 0; i < num; i++) {
            reap(&children[i]);
            if (children[i].pid == 0 && !children[i].succeeded) {
                return -1;
            }
            num_succeeded += children[i].pid == 0;
        }
        if (num_succeeded == num) {
            return 0;
        }
        int waited = await_signal(signals, deadline);
        if (waited <= 0) {
            fprintf(stderr, "demo: %s\n", waited == 0 ? "not done in time" : "interrupted");
            signal_children(children, num, SIGTERM);
            return -1;
        }
    }
}

/* Ends the children that still run: gives them time to say why their run failed, asks them to end, kills them. */
static void stop_children(child_t *children, uint32_t num) {
    uint64_t deadline = now_ns() + KILL_TIMEOUT_S * 1000000000ull;
    int asked = 0;
    for (;;) {
        uint32_t num_running = 0;
        for (uint32_t i = 0; i < num; i++) {
            reap(&children[i]);
            num_running += children[i].pid != 0;
        }
        if (num_running == 0) {
            return;
        }
        if (now_ns() >= deadline) {
            signal_children(children, num, asked ? SIGKILL : SIGTERM);
            deadline = now_ns() + KILL_TIMEOUT_S * 1000000000ull;
            asked = 1;
        }
        nanosleep(&(struct timespec){.tv_nsec = 10000000}, NULL);
    }
}

/* ---- files ---- */

/* Formats a path. 0, or -1 when it is too long. */
__attribute__((format(printf, 2, 3))) static int format_path(char path[PATH_MAX], const char *format, ...) {
    va_list arguments;
    va_start(arguments, format);
    int len = vsnprintf(path, PATH_MAX, format, arguments);
    va_end(arguments);
    if (len < 0 || len >= PATH_MAX) {
        fprintf(stderr, "demo: a path is too long\n");
        return -1;
    }
    return 0;
}

static int make_paths(paths_t *paths, const char *program) {
    const char *temporary = getenv("TMPDIR");
    char directory[PATH_MAX];
    *paths = (paths_t){0};
    if (realpath(program, paths->programs) == NULL) {
        perror(program);
        return -1;
    }
    *strrchr(paths->programs, '/') = '\0';
    if (format_path(directory, "%s/nixlkv-demo-XXXXXX", temporary != NULL ? temporary : "/tmp") != 0) {
        return -1;
    }
    if (mkdtemp(directory) == NULL) {
        perror(directory);
        return -1;
    }
    memcpy(paths->directory, directory, sizeof directory);
    if (format_path(paths->socket, "%s/socket", directory) != 0 ||
        format_path(paths->expected, "%s/expected", directory) != 0 ||
        format_path(paths->moved, "%s/moved", directory) != 0) {
        return -1;
    }
    return 0;
}

static void remove_paths(const paths_t *paths) {
    if (paths->directory[0] == '\0') {
        return;
    }
    unlink(paths->socket);
    unlink(paths->expected);
    unlink(paths->moved);
    if (rmdir(paths->directory) != 0) {
        perror(paths->directory);
    }
}

/* ---- the table ---- */

static int is_identical(const result_t *expected, const result_t *moved) {
    return memcmp(expected->tokens, moved->tokens, sizeof expected->tokens) == 0 && expected->digest == moved->digest;
}

static int is_complete(const result_t *moved) {
    uint64_t num_chunks = (moved->num_prompt + REQUEST_CHUNK_TOKENS - 1) / REQUEST_CHUNK_TOKENS;
    uint64_t num_bytes = (uint64_t)moved->num_pages * PAGE_BYTES + STATE_BYTES + AUX_BYTES;
    return moved->error == 0 && moved->first_ns != 0 && moved->num_chunks == num_chunks &&
           moved->num_bytes == num_bytes;
}

/* Milliseconds between two times. */
static double ms_between(uint64_t from_ns, uint64_t to_ns) {
    return ((double)to_ns - (double)from_ns) / 1e6;
}

/* Prints what moved, and returns the number of requests whose tokens and bytes are all right. */
static uint32_t print_table(const result_t *expected, const result_t *moved, uint32_t num) {
    uint64_t total_bytes = 0;
    uint32_t total_prompt = 0, num_good = 0;
    printf("        prompt                  KV   state     aux    NIXL   milliseconds until landed from   tokens\n"
           "request tokens pages chunks    KiB     KiB     KiB  descr.  opening  first chunk last chunk  identical\n");
    for (uint32_t i = 0; i < num; i++) {
        const result_t *result = &moved[i];
        int identical = is_identical(&expected[i], result), complete = is_complete(result);
        printf("%7u %6u %5u %6u %6u %7.1f %7.1f %7llu ", result->index, result->num_prompt, result->num_pages,
               result->num_chunks, result->num_pages * PAGE_BYTES / 1024, STATE_BYTES / 1024.0, AUX_BYTES / 1024.0,
               (unsigned long long)result->num_descriptors);
        if (complete) {
            printf("%8.1f %12.1f %10.1f  %s\n", ms_between(result->opened_ns, result->landed_ns),
                   ms_between(result->first_ns, result->landed_ns), ms_between(result->last_ns, result->landed_ns),
                   identical ? "yes" : "NO");
        } else {
            printf("%8s %12s %10s  NO, not all has landed\n", "-", "-", "-");
        }
        total_bytes += result->num_bytes;
        total_prompt += result->num_prompt;
        num_good += identical && complete;
    }
    printf("opening and first chunk include the prefill itself; what follows the last chunk is the transfer's own\n");
    printf("%u prompt tokens, %.1f MiB moved\n", total_prompt, (double)total_bytes / (1 << 20));
    return num_good;
}

/* ---- the whole ---- */

static int run_single(const paths_t *paths, const char *num, const sigset_t *signals, const sigset_t *mask) {
    char *arguments[] = {"single", "--requests", (char *)num, "--out", (char *)paths->expected, NULL};
    child_t single;
    if (start(&single, paths, "single", arguments, mask) != 0) {
        return -1;
    }
    int status = wait_children(&single, 1, signals, SINGLE_TIMEOUT_S);
    if (status != 0) {
        stop_children(&single, 1);
    }
    return status;
}

static int run_pair(const paths_t *paths, const char *num, const sigset_t *signals, const sigset_t *mask) {
    char *prefill[] = {"prefill", "--socket", (char *)paths->socket, NULL};
    char *decode[] = {"decode", "--socket", (char *)paths->socket, "--requests",
                      (char *)num, "--out", (char *)paths->moved,  NULL};
    child_t children[2] = {{0}};
    int status = start(&children[0], paths, "prefill", prefill, mask);
    if (status == 0) {
        status = start(&children[1], paths, "decode", decode, mask);
    }
    if (status == 0) {
        status = wait_children(children, 2, signals, RUN_TIMEOUT_S);
    }
    if (status != 0) {
        stop_children(children, 2);
    }
    return status;
}

static int run(const paths_t *paths, uint32_t num, const sigset_t *signals, const sigset_t *mask) {
    static result_t expected[REQUEST_MAX], moved[REQUEST_MAX];
    char text[16];
    snprintf(text, sizeof text, "%u", num);
    uint64_t begin = now_ns();
    printf("%u requests in one process ...\n", num);
    fflush(stdout);
    if (run_single(paths, text, signals, mask) != 0) {
        return -1;
    }
    printf("  %.1f s\nthe same from prefill to decode over NIXL ...\n", ms_between(begin, now_ns()) / 1000);
    fflush(stdout);
    begin = now_ns();
    int status = run_pair(paths, text, signals, mask);
    printf("  %.1f s\n", ms_between(begin, now_ns()) / 1000);
    if (results_read(paths->expected, expected, num) != 0 || results_read(paths->moved, moved, num) != 0) {
        fprintf(stderr, "demo: there are no results\n");
        return -1;
    }
    uint32_t num_good = print_table(expected, moved, num);
    if (status != 0 || num_good != num) {
        printf("%u requests, %u NOT GOOD\n", num, num - num_good);
        return -1;
    }
    printf("%u requests, all tokens identical\n", num);
    return 0;
}

int main(int argc, char **argv) {
    uint32_t num = REQUEST_MAX;
    if (argc != 1 &&
        (argc != 3 || strcmp(argv[1], "--requests") != 0 || parse_number(argv[2], 1, REQUEST_MAX, &num) != 0)) {
        fprintf(stderr, "usage: demo [--requests N]\n");
        return 2;
    }
    /* these are waited for, never delivered, so that every end passes through the clean-up below */
    sigset_t signals, mask;
    sigemptyset(&signals);
    sigaddset(&signals, SIGCHLD);
    sigaddset(&signals, SIGINT);
    sigaddset(&signals, SIGTERM);
    sigaddset(&signals, SIGHUP);
    if (sigprocmask(SIG_BLOCK, &signals, &mask) != 0) {
        perror("demo: sigprocmask");
        return EXIT_FAILURE;
    }
    paths_t paths;
    int status = make_paths(&paths, argv[0]);
    if (status == 0) {
        status = run(&paths, num, &signals, &mask);
    }
    remove_paths(&paths);
    return status == 0 ? EXIT_SUCCESS : EXIT_FAILURE;
}
