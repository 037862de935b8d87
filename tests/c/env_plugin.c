/* I13: NIXL is there and its UCX plugin is not: no folder, an empty one, a plugin cut short, one of another machine,
 * one that is no plugin. The process lives on, and makes an engine once the plugin is right. */
/* quiet */
#include "env.h"

static void fresh_plugin(const char *path, const char *from, uint64_t numerator, uint64_t denominator) {
    /* Under a name of its own each time: a file that a loader may have mapped is not changed under its hands. */
    unlink(path);
    copy_part(from, path, numerator, denominator);
}

int main(void) {
    char real[PATH_MAX], folder[PATH_MAX], plugin[PATH_MAX];
    snprintf(real, sizeof real, "%s", beside_library("plugins/libplugin_UCX.so"));
    if (access(real, R_OK) != 0) FAIL("%s is not there: this NIXL keeps its plugins elsewhere", real);
    snprintf(folder, sizeof folder, "%s", in_folder("plugins"));
    snprintf(plugin, sizeof plugin, "%s", in_folder("plugins/libplugin_UCX.so"));
    const nixlkv_engine_config_t config = engine_config(NIXLKV_ROLE_PREFILL);

    CHECK(setenv("NIXL_PLUGIN_DIR", folder, 1) == 0);
    expect_no_engine(&config, NIXL_ERR_PLUGIN_NOT_FOUND, folder); /* no such folder */
    CHECK(mkdir(folder, 0755) == 0);
    expect_no_engine(&config, NIXL_ERR_PLUGIN_NOT_FOUND, folder); /* empty */
    CHECK(strstr(nixlkv_last_error(), "libplugin_UCX.so") != NULL);
    CHECK(strstr(nixlkv_last_error(), "NIXL_PLUGIN_DIR") != NULL);
    for (uint64_t quarter = 1; quarter < 4; quarter++) {
        fresh_plugin(plugin, real, quarter, 4);
        expect_no_engine(&config, NIXL_ERR_PLUGIN_INVALID, plugin);
    }
    fresh_plugin(plugin, real, 1, 1);
    const int fd = open(plugin, O_RDWR);
    unsigned char machine = 0;
    CHECK(fd >= 0 && pread(fd, &machine, 1, 18) == 1);
    machine = machine == 183 ? 62 : 183;
    CHECK(pwrite(fd, &machine, 1, 18) == 1 && close(fd) == 0);
    expect_no_engine(&config, NIXL_ERR_PLUGIN_INVALID, plugin);
    /* A sound library that is no plugin. */
    unlink(plugin);
    FILE *source = fopen(in_folder("none.c"), "w");
    CHECK(source != NULL && fputs("int none;\n", source) >= 0 && fclose(source) == 0);
    char command[3 * PATH_MAX];
    snprintf(command, sizeof command, "cc -shared -fPIC -o '%s' '%s'", plugin, in_folder("none.c"));
    CHECK(system(command) == 0);
    expect_no_engine(&config, NIXL_ERR_PLUGIN_INVALID, "nixl_plugin_init");
    CHECK(unlink(plugin) == 0);
    expect_no_engine(&config, NIXL_ERR_PLUGIN_NOT_FOUND, folder);
    /* A backend that nobody has. */
    nixlkv_engine_config_t other = config;
    other.backend = "NOSUCH";
    CHECK(unsetenv("NIXL_PLUGIN_DIR") == 0);
    expect_no_engine(&other, NIXL_ERR_PLUGIN_NOT_FOUND, "libplugin_NOSUCH.so");
    CHECK(strstr(nixlkv_last_error(), "UCX") != NULL); /* what there is instead */
    expect_engines_work(config);
    return 0;
}
