/* I13: libnixl_capi.so is missing, cut short, of another machine, or lacks a function. Each has its own readable error,
 * the process lives on, and makes an engine once the library is right. */
/* quiet */
#include "env.h"

/* A machine that this is not, at the place of e_machine in an ELF header. */
static void change_machine(const char *path) {
    const int fd = open(path, O_RDWR);
    unsigned char header[20];
    CHECK(fd >= 0 && pread(fd, header, sizeof header, 0) == (ssize_t)sizeof header);
    const unsigned char other = header[18] == 183 ? 62 : 183; /* EM_X86_64, EM_AARCH64 */
    CHECK(pwrite(fd, &other, 1, 18) == 1);
    close(fd);
}

int main(void) {
    char real[PATH_MAX];
    snprintf(real, sizeof real, "%s", real_library());
    CHECK(unsetenv("NIXLKV_NIXL_LIBRARY") == 0);
    nixlkv_engine_config_t config = engine_config(NIXLKV_ROLE_PREFILL);

    /* Found nowhere: every place that was tried is named. */
    CHECK(setenv("LD_LIBRARY_PATH", in_folder("no_libraries"), 1) == 0);
    CHECK(setenv("PATH", in_folder("no_programs"), 1) == 0 && setenv("HOME", in_folder("no_home"), 1) == 0);
    CHECK(setenv("VIRTUAL_ENV", in_folder("no_venv"), 1) == 0 && unsetenv("CONDA_PREFIX") == 0);
    CHECK(unsetenv("PYENV_ROOT") == 0 && unsetenv("PYTHONUSERBASE") == 0);
    expect_no_engine(&config, NIXL_ERR_LIBRARY_NOT_FOUND, "NIXLKV_NIXL_LIBRARY");
    CHECK(strstr(nixlkv_last_error(), "the dynamic linker") != NULL);
    CHECK(strstr(nixlkv_last_error(), in_folder("no_venv")) != NULL);
    CHECK(strstr(nixlkv_last_error(), in_folder("no_home")) != NULL);
    /* Named, and not there. */
    config.nixl_library = in_folder("absent.so");
    expect_no_engine(&config, NIXL_ERR_LIBRARY_NOT_FOUND, "absent.so");
    config.nixl_library = NULL;
    CHECK(setenv("NIXLKV_NIXL_LIBRARY", in_folder("also_absent.so"), 1) == 0);
    expect_no_engine(&config, NIXL_ERR_LIBRARY_NOT_FOUND, "also_absent.so");
    CHECK(strstr(nixlkv_last_error(), "NIXLKV_NIXL_LIBRARY") != NULL);
    CHECK(unsetenv("NIXLKV_NIXL_LIBRARY") == 0);

    /* Cut short at every quarter, empty, not a library, of another machine. */
    CHECK(mkdir(in_folder("bad"), 0755) == 0);
    config.nixl_library = in_folder("bad/libnixl_capi.so");
    for (uint64_t quarter = 1; quarter < 4; quarter++) {
        copy_part(real, config.nixl_library, quarter, 4);
        expect_no_engine(&config, NIXL_ERR_LIBRARY_INVALID, "bad/libnixl_capi.so");
    }
    copy_part(real, config.nixl_library, 1, 1);
    change_machine(config.nixl_library);
    expect_no_engine(&config, NIXL_ERR_LIBRARY_INVALID, "bad/libnixl_capi.so");
    FILE *text = fopen(config.nixl_library, "w");
    CHECK(text != NULL);
    expect_no_engine(&config, NIXL_ERR_LIBRARY_INVALID, "bad/libnixl_capi.so");
    CHECK(fputs("This is no library, but a text about one.\n", text) >= 0 && fclose(text) == 0);
    expect_no_engine(&config, NIXL_ERR_LIBRARY_INVALID, "bad/libnixl_capi.so");
    config.nixl_library = in_folder("bad");
    expect_no_engine(&config, NIXL_ERR_LIBRARY_INVALID, "bad");

    /* A sound library under the right name with one function only. */
    CHECK(mkdir(in_folder("fake"), 0755) == 0);
    FILE *source = fopen(in_folder("fake.c"), "w");
    CHECK(source != NULL && fputs("int nixl_capi_create_agent(void) { return 0; }\n", source) >= 0);
    CHECK(fclose(source) == 0);
    char command[3 * PATH_MAX];
    snprintf(command, sizeof command,
             "PATH=/usr/local/bin:/usr/bin:/bin cc -shared -fPIC -Wl,-soname,libnixl_capi.so -o '%s' '%s'",
             in_folder("fake/libnixl_capi.so"), in_folder("fake.c"));
    CHECK(system(command) == 0);
    config.nixl_library = in_folder("fake/libnixl_capi.so");
    expect_no_engine(&config, NIXL_ERR_SYMBOL_MISSING, "nixl_capi_");
    CHECK(strstr(nixlkv_last_error(), "fake/libnixl_capi.so") != NULL);

    /* Calls that need no NIXL work meanwhile; and with the right library everything does. */
    CHECK(nixlkv_abi_version() == NIXLKV_ABI_VERSION);
    config.nixl_library = real;
    expect_engines_work(config);
    /* The environment and the configuration name the same one by now; another one is refused, not mixed in. */
    config.nixl_library = in_folder("fake/libnixl_capi.so");
    expect_no_engine(&config, NIXL_ERR_LIBRARY_INVALID, "has loaded");
    config.nixl_library = NULL;
    expect_engines_work(config);
    return 0;
}
