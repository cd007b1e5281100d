/* Included ahead of every file by `make wheel`, so that a wheel built beside a newer glibc runs with 2.28. Of what we call, two
 * functions got a new version since (2.29: they set no errno, which -fno-math-errno asks for anyway). The old ones give the same
 * bits. Where glibc is 2.28 (cibuildwheel's images) the linker takes them by itself. */
#if defined(__x86_64__)
__asm__(".symver exp,exp@GLIBC_2.2.5");
__asm__(".symver pow,pow@GLIBC_2.2.5");
#elif defined(__aarch64__)
__asm__(".symver exp,exp@GLIBC_2.17");
__asm__(".symver pow,pow@GLIBC_2.17");
#endif
