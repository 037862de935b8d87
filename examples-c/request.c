/*
 * request.c: see request.h.
 */
#define _POSIX_C_SOURCE 200809L

#include "request.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

/* Mixed lengths with a long tail, and the edges: one token, whole pages, whole chunks, one more or less of each. */
static const uint16_t prompt_lengths[REQUEST_MAX] = {
    700, 96, 256, 3000, 33, 180, 1,   512, 1400, 64,  257, 310, 16,  900, 48,  2100,
    128, 17, 420, 255,  75, 600, 240, 15,  1100, 140, 384, 31,  513, 210, 768, 110,
};

uint32_t request_num_prompt(uint32_t index) {
    return prompt_lengths[index];
}

void request_prompt(uint32_t index, int32_t *tokens) {
    uint64_t random = 1000 + index;
    for (uint32_t i = 0; i < request_num_prompt(index); i++) {
        tokens[i] = (int32_t)(model_random(&random) % MODEL_VOCAB);
    }
}

uint32_t request_num_pages(uint32_t num_tokens) {
    return (num_tokens + MODEL_PAGE_TOKENS - 1) / MODEL_PAGE_TOKENS;
}

int results_write(const char *path, const result_t *results, uint32_t num) {
    FILE *file = fopen(path, "wb");
    if (file == NULL) {
        return -1;
    }
    int failed = fwrite(results, sizeof *results, num, file) != num;
    failed |= fclose(file) != 0;
    return failed ? -1 : 0;
}

int results_read(const char *path, result_t *results, uint32_t num) {
    FILE *file = fopen(path, "rb");
    if (file == NULL) {
        return -1;
    }
    errno = 0;
    int failed = fread(results, sizeof *results, num, file) != num || fgetc(file) != EOF || ferror(file);
    failed |= fclose(file) != 0;
    return failed ? -1 : 0;
}

int parse_number(const char *text, uint32_t min, uint32_t max, uint32_t *number) {
    char *end;
    errno = 0;
    unsigned long long value = strtoull(text, &end, 10);
    if (text[0] < '0' || text[0] > '9' || *end != '\0' || errno != 0 || value < min || value > max) {
        return -1;
    }
    *number = (uint32_t)value;
    return 0;
}

uint64_t now_ns(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
}
