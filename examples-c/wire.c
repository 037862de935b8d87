/*
 * wire.c: see wire.h.
 */
#define _GNU_SOURCE

#include "wire.h"

#include <errno.h>
#include <poll.h>
#include <stddef.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <time.h>
#include <unistd.h>

typedef struct header {
    uint32_t type;
    uint32_t len;
} header_t;

uint64_t wire_request_len(uint32_t num_tokens) {
    return offsetof(wire_request_t, tokens) + num_tokens * sizeof(int32_t);
}

static int make_address(const char *path, struct sockaddr_un *address) {
    *address = (struct sockaddr_un){.sun_family = AF_UNIX};
    if (strlen(path) >= sizeof address->sun_path) {
        errno = ENAMETOOLONG;
        return -1;
    }
    memcpy(address->sun_path, path, strlen(path) + 1);
    return 0;
}

/* Closes a descriptor after a failure, whose errno it keeps. */
static int close_failed(int fd) {
    int error = errno;
    close(fd);
    errno = error;
    return -1;
}

int wire_listen(const char *path) {
    struct sockaddr_un address;
    if (make_address(path, &address) != 0) {
        return -1;
    }
    int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
    if (fd < 0) {
        return -1;
    }
    if (bind(fd, (struct sockaddr *)&address, sizeof address) != 0 || listen(fd, 1) != 0) {
        return close_failed(fd);
    }
    return fd;
}

/* Waits for the events until the deadline. errno is EAGAIN when it passes. */
static int await(int fd, short events, uint64_t deadline_ns) {
    for (;;) {
        uint64_t now = now_ns();
        int left_ms = now >= deadline_ns ? 0 : (int)((deadline_ns - now + 999999) / 1000000);
        struct pollfd entry = {.fd = fd, .events = events};
        int ready = poll(&entry, 1, left_ms);
        if (ready > 0) {
            return 0;
        }
        if (ready < 0 && errno != EINTR) {
            return -1;
        }
        if (ready == 0 && left_ms == 0) {
            errno = EAGAIN;
            return -1;
        }
    }
}

static uint64_t deadline_of(int timeout_ms) {
    return now_ns() + (uint64_t)timeout_ms * 1000000u;
}

int wire_accept(int listener, int timeout_ms) {
    if (await(listener, POLLIN, deadline_of(timeout_ms)) != 0) {
        return -1;
    }
    return accept4(listener, NULL, NULL, SOCK_CLOEXEC);
}

int wire_connect(const char *path, int timeout_ms) {
    struct sockaddr_un address;
    uint64_t deadline = deadline_of(timeout_ms);
    if (make_address(path, &address) != 0) {
        return -1;
    }
    int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
    if (fd < 0) {
        return -1;
    }
    while (connect(fd, (struct sockaddr *)&address, sizeof address) != 0) {
        if ((errno != ENOENT && errno != ECONNREFUSED && errno != EINTR) || now_ns() >= deadline) {
            return close_failed(fd);
        }
        nanosleep(&(struct timespec){.tv_nsec = 10000000}, NULL);
    }
    return fd;
}

static int send_all(int fd, const char *bytes, uint64_t len, uint64_t deadline_ns) {
    while (len > 0) {
        ssize_t sent = send(fd, bytes, len, MSG_DONTWAIT | MSG_NOSIGNAL);
        if (sent > 0) {
            bytes += sent;
            len -= (uint64_t)sent;
        } else if (errno == EAGAIN || errno == EWOULDBLOCK) {
            if (await(fd, POLLOUT, deadline_ns) != 0) {
                return -1;
            }
        } else if (errno != EINTR) {
            return -1;
        }
    }
    return 0;
}

static int recv_all(int fd, char *bytes, uint64_t len, uint64_t deadline_ns) {
    while (len > 0) {
        ssize_t received = recv(fd, bytes, len, MSG_DONTWAIT);
        if (received > 0) {
            bytes += received;
            len -= (uint64_t)received;
        } else if (received == 0) {
            errno = EPIPE;
            return -1;
        } else if (errno == EAGAIN || errno == EWOULDBLOCK) {
            if (await(fd, POLLIN, deadline_ns) != 0) {
                errno = errno == EAGAIN ? ETIMEDOUT : errno; /* in the middle of a frame */
                return -1;
            }
        } else if (errno != EINTR) {
            return -1;
        }
    }
    return 0;
}

int wire_send(int fd, uint32_t type, const void *payload, uint64_t len, int timeout_ms) {
    uint64_t deadline = deadline_of(timeout_ms);
    if (len > WIRE_MAX_PAYLOAD) {
        errno = EMSGSIZE;
        return -1;
    }
    header_t header = {.type = type, .len = (uint32_t)len};
    if (send_all(fd, (const char *)&header, sizeof header, deadline) != 0) {
        return -1;
    }
    return send_all(fd, payload, len, deadline);
}

int wire_recv(int fd, uint32_t *type, void *payload, uint64_t capacity, uint64_t *len, int timeout_ms) {
    enum { REST_TIMEOUT_MS = 10000 }; /* once a frame has begun, the rest must come */
    header_t header;
    if (await(fd, POLLIN, deadline_of(timeout_ms)) != 0) {
        return -1;
    }
    uint64_t deadline = deadline_of(REST_TIMEOUT_MS);
    if (recv_all(fd, (char *)&header, sizeof header, deadline) != 0) {
        return -1;
    }
    if (header.len > capacity || header.len > WIRE_MAX_PAYLOAD) {
        errno = EMSGSIZE;
        return -1;
    }
    if (recv_all(fd, payload, header.len, deadline) != 0) {
        return -1;
    }
    *type = header.type;
    *len = header.len;
    return 0;
}

int wire_expect(int fd, uint32_t type, void *payload, uint64_t capacity, uint64_t *len, int timeout_ms) {
    uint32_t received;
    if (wire_recv(fd, &received, payload, capacity, len, timeout_ms) != 0) {
        return -1;
    }
    if (received != type) {
        errno = EPROTO;
        return -1;
    }
    return 0;
}
