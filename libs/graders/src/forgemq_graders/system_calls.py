"""The system calls that a program in the sandbox may not make, as a filter of the kernel.

Namespaces bound what a program can reach; the filter takes away what its limits do not count
(memory that no process maps), what has no namespace (sockets of a hypervisor, keys, clocks), and
what defects of kernels are made of. Numbers are those of x86_64, which the kernel never changes.
Source: seccomp(2), linux/filter.h; the choice follows Docker's default profile.
"""

import errno
import struct

_ALLOW, _ERROR, _KILL = 0x7FFF0000, 0x00050000, 0x80000000
_LOAD, _EQUAL, _AT_LEAST, _AND, _RETURN = 0x20, 0x15, 0x35, 0x54, 0x06
_NUMBER_AT, _MACHINE_AT, _ARGUMENTS_AT = 0, 4, 16  # in struct seccomp_data
_ARGUMENT_BYTES = 8  # Only the lower half is read: these arguments are of 32 bits.
_X86_64, _X32 = 0xC000003E, 0x40000000
_MMAP, _SOCKET, _SOCKET_PAIR, _CLONE, _FILE_CONTROL, _CLONE_3 = 9, 41, 53, 56, 72, 435
_LIMITS_OF = 302
_LOCAL_FAMILY, _STREAM, _SOCKET_TYPE = 1, 1, 0xF
_NEW_NAMESPACES = 0x7E020000
_SHARED_WITHOUT_FILE = 0x21
_SET_PIPE_SIZE = 1031
_ALL_BITS = 0xFFFFFFFF

DENIED = {
    # Other processes.
    **{"ptrace": 101, "process_vm_readv": 310, "process_vm_writev": 311, "kcmp": 312},
    **{"pidfd_getfd": 438},
    # Mounts and namespaces.
    **{"pivot_root": 155, "chroot": 161, "mount": 165, "umount2": 166, "unshare": 272},
    **{"setns": 308, "open_tree": 428, "move_mount": 429, "fsopen": 430, "fsconfig": 431},
    **{"fsmount": 432, "fspick": 433, "mount_setattr": 442, "open_tree_attr": 467},
    **{"name_to_handle_at": 303, "open_by_handle_at": 304},
    # Memory that no process has to map, or that other limits do not count.
    **{"shmget": 29, "shmat": 30, "shmctl": 31, "semget": 64, "msgget": 68, "mq_open": 240},
    **{"memfd_create": 319, "memfd_secret": 447, "vmsplice": 278, "setsockopt": 54},
    # Sockets beside the pairs of connected ones that the filter allows.
    **{"connect": 42, "bind": 49, "listen": 50},
    **{"mbind": 237, "set_mempolicy": 238, "migrate_pages": 256, "move_pages": 279},
    # Keys, clocks, the machine.
    **{"add_key": 248, "request_key": 249, "keyctl": 250, "syslog": 103, "acct": 163},
    **{"adjtimex": 159, "settimeofday": 164, "clock_settime": 227, "clock_adjtime": 305},
    **{"swapon": 167, "swapoff": 168, "reboot": 169, "sethostname": 170, "setdomainname": 171},
    **{"iopl": 172, "ioperm": 173, "init_module": 175, "delete_module": 176, "quotactl": 179},
    **{"kexec_load": 246, "finit_module": 313, "kexec_file_load": 320, "quotactl_fd": 443},
    # Large or old parts of the kernel that programs do without.
    **{"uselib": 134, "personality": 135, "ustat": 136, "sysfs": 139, "vhangup": 153},
    **{"modify_ldt": 154, "_sysctl": 156, "lookup_dcookie": 212, "perf_event_open": 298},
    **{"fanotify_init": 300, "bpf": 321, "userfaultfd": 323, "io_uring_setup": 425},
    **{"io_uring_enter": 426, "io_uring_register": 427},
}
"""Their number by name; each fails with EPERM."""


def call_filter() -> bytes:
    """The filter as instructions of 8 bytes each, for prctl(PR_SET_SECCOMP)."""
    instructions = [
        _instruction(_LOAD, _MACHINE_AT),
        _instruction(_EQUAL, _X86_64, skip_if_true=1),
        _instruction(_RETURN, _KILL),
        _instruction(_LOAD, _NUMBER_AT),
        _instruction(_AT_LEAST, _X32, skip_if_false=1),
        _instruction(_RETURN, _KILL),
        *_fails(_CLONE_3, errno.ENOSYS),  # The C library then uses clone, whose flags can be read.
        *_fails(_SOCKET, errno.EAFNOSUPPORT),
    ]
    for number in DENIED.values():
        instructions += _fails(number, errno.EPERM)
    # Pairs of connected local streams are what event loops and processes of one program need. A
    # socket of its own can do more: a queue of connections that nobody accepts holds what closed
    # sockets sent, without an open file for each.
    instructions += _fails_unless(_SOCKET_PAIR, 0, _ALL_BITS, _LOCAL_FAMILY, errno.EAFNOSUPPORT)
    instructions += _fails_unless(_SOCKET_PAIR, 1, _SOCKET_TYPE, _STREAM, errno.EPROTONOSUPPORT)
    # Pages of a shared mapping stay until its last page is unmapped, though no process has them
    # mapped and so none is resident. Those of a file are bounded by the folder that it lies in.
    instructions += _fails_if(_MMAP, 3, _SHARED_WITHOUT_FILE, _SHARED_WITHOUT_FILE)
    instructions += _fails_if(_FILE_CONTROL, 1, _ALL_BITS, _SET_PIPE_SIZE)
    # Of another process, by its number: a limit on time would kill a plain user's process 1.
    instructions += _fails_unless(_LIMITS_OF, 0, _ALL_BITS, 0, errno.EPERM)
    instructions += _fails_unless(_CLONE, 0, _NEW_NAMESPACES, 0, errno.EPERM)
    instructions.append(_instruction(_RETURN, _ALLOW))
    return b"".join(instructions)


def _fails(number: int, error: int) -> tuple[bytes, ...]:
    return (
        _instruction(_EQUAL, number, skip_if_false=1),
        _instruction(_RETURN, _ERROR | error),
    )


def _fails_unless(
    number: int, argument: int, bits: int, value: int, error: int
) -> tuple[bytes, ...]:
    """This call fails unless these bits of its argument have this value."""
    return (
        _instruction(_EQUAL, number, skip_if_false=5),
        _instruction(_LOAD, _ARGUMENTS_AT + _ARGUMENT_BYTES * argument),
        _instruction(_AND, bits),
        _instruction(_EQUAL, value, skip_if_true=1),
        _instruction(_RETURN, _ERROR | error),
        _instruction(_LOAD, _NUMBER_AT),
    )


def _fails_if(number: int, argument: int, bits: int, value: int) -> tuple[bytes, ...]:
    """This call fails if these bits of its argument have this value."""
    return (
        _instruction(_EQUAL, number, skip_if_false=5),
        _instruction(_LOAD, _ARGUMENTS_AT + _ARGUMENT_BYTES * argument),
        _instruction(_AND, bits),
        _instruction(_EQUAL, value, skip_if_false=1),
        _instruction(_RETURN, _ERROR | errno.EPERM),
        _instruction(_LOAD, _NUMBER_AT),
    )


def _instruction(code: int, value: int, *, skip_if_true: int = 0, skip_if_false: int = 0) -> bytes:
    return struct.pack("<HBBI", code, skip_if_true, skip_if_false, value)
