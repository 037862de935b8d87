/* E3: the link between two engines is down for longer than the liveness limit. The rooms of that time fail with their
 * * code, and new ones work within 5 s of its being up again, without anybody's restarting anything. */
/* timeout: 120 */
#include "flow.h"

#include <net/if.h>
#include <sched.h>
#include <sys/ioctl.h>

enum { LIMIT_MS = 1500, BREAK_MS = 3500, LONG_BREAK_MS = 10000, HEALED_MS = 5000 };

static node_t prefill, decode;
static uint64_t decode_peer, prefill_peer;

static void link_is(bool up) {
    const int fd = socket(AF_INET, SOCK_DGRAM, 0);
    CHECK(fd >= 0);
    struct ifreq request = {.ifr_name = "lo"};
    CHECK(ioctl(fd, SIOCGIFFLAGS, &request) == 0);
    if (up) request.ifr_flags |= IFF_UP;
    else request.ifr_flags = (short)(request.ifr_flags & ~IFF_UP);
    CHECK(ioctl(fd, SIOCSIFFLAGS, &request) == 0);
    close(fd);
}

/* Until decode may open a room with prefill again. */
static void await_back(const request_t *r, uint64_t since) {
    while (receive(&decode, r, &prefill_peer, 1).status != NIXL_OK) {
        if (now_ms() - since > HEALED_MS) FAIL("not back after %d ms", HEALED_MS);
        sleep_ms(20);
    }
    EXPECT(send_part(&prefill, r, 0, 20, NIXLKV_CHUNK_LAST), NIXL_OK);
    EXPECT_OVER(&decode, r->room, NIXL_OK, "", 10000);
    EXPECT_OVER(&prefill, r->room, NIXL_OK, "", 10000);
    printf("the first transfer was over %" PRIu64 " ms after the link was up\n", now_ms() - since);
    fflush(stdout);
}

static uint64_t link_down_until(uint64_t end) {
    while (now_ms() < end) sleep_ms(10);
    link_is(true);
    return now_ms();
}

int main(void) {
    CHECK(unshare(CLONE_NEWNET) == 0);
    link_is(true);
    node_config_t config = {.heartbeat_ms = 200, .liveness_ms = LIMIT_MS};
    config.role = NIXLKV_ROLE_PREFILL;
    prefill = node_start(config);
    config.role = NIXLKV_ROLE_DECODE;
    decode = node_start(config);
    join(&prefill, &decode, &decode_peer, &prefill_peer);
    transfer_works(&prefill, &decode, prefill_peer, 1);

    /* With a room open. TCP tries again ever more rarely, so the way back takes about as long as the break, at most. */
    const request_t r = request_of(2, 20), next = request_of(3, 20);
    EXPECT(receive(&decode, &r, &prefill_peer, 1), NIXL_OK);
    EXPECT(send_part(&prefill, &r, 0, 5, 0), NIXL_OK);
    for (const uint64_t start = now_ms(); status_of(&decode, 2).num_pages < 5; sleep_ms(1))
        CHECK(now_ms() - start < 10000);
    const uint64_t start = now_ms();
    link_is(false);
    EXPECT_ENDED(&decode, 2, NIXL_ERR_PEER_LOST, "", 10000);
    EXPECT_ENDED(&prefill, 2, NIXL_ERR_PEER_LOST, "", 10000);
    CHECK(now_ms() - start < 3 * LIMIT_MS);
    EXPECT(receive(&decode, &next, &prefill_peer, 1), NIXL_ERR_PEER_LOST);
    await_back(&next, link_down_until(start + BREAK_MS));
    EXPECT_OVER(&decode, 2, NIXL_ERR_PEER_LOST, "", 10000);
    EXPECT_OVER(&prefill, 2, NIXL_ERR_PEER_LOST, "", 10000);
    transfer_works(&prefill, &decode, prefill_peer, 4);

    /* Idle, and for longer: who does not want to wait for TCP connects anew. */
    link_is(false);
    const uint64_t up = link_down_until(now_ms() + LONG_BREAK_MS);
    EXPECT(ask(&prefill, &(op_t){.what = OP_DISCONNECT, .senders = {decode_peer}}), NIXL_OK);
    EXPECT(ask(&decode, &(op_t){.what = OP_DISCONNECT, .senders = {prefill_peer}}), NIXL_OK);
    join(&prefill, &decode, &decode_peer, &prefill_peer);
    await_back(&next, up);
    transfer_works(&prefill, &decode, prefill_peer, 5);
    node_quit(&prefill);
    node_quit(&decode);
    return 0;
}
