/* C7: creating an engine ends within its time limit, and the next attempt succeeds. */
/* quiet */
#include "env.h"

int main(void) {
    nixlkv_engine_config_t config = engine_config(NIXLKV_ROLE_DECODE);
    config.create_timeout_ms = 300;
    CHECK_OK(nixlkv_test_fault("create_hangs", 0, 1));
    const uint64_t start = now_ms();
    expect_no_engine(&config, NIXL_ERR_CREATE_TIMEOUT, "within 300 ms");
    CHECK(now_ms() - start < 1800); /* it would have hung for 2000 */
    CHECK(nixlkv_status_retryable(NIXL_ERR_CREATE_TIMEOUT) == 1);
    config.create_timeout_ms = 0;
    expect_engines_work(config);
    sleep_ms(2500); /* what was hanging has started by now, and is taken down behind our back */
    expect_engines_work(config);
    return 0;
}
