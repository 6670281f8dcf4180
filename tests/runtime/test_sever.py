"""Connections are cut at both ends, spared ones and those of others are not, and no file number is left behind."""

import os
import socket

import pytest

from evenload.runtime.comm import sever


@pytest.fixture
def listener():
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server


def connected(listener: socket.socket) -> tuple[socket.socket, socket.socket]:
    ours = socket.create_connection(listener.getsockname())
    return ours, listener.accept()[0]


def test_all_but_spared_connections_end_at_both_ends(listener):
    with socket.socketpair()[0] as local:
        kept = connected(listener)
        spared = sever.open_sockets()
        lost = connected(listener)
        for end in (*kept, *lost):
            end.settimeout(10)
        assert sever.sever_all_but(spared) == 2
        assert lost[0].recv(1) == lost[1].recv(1) == b""
        kept[0].sendall(b"x")
        assert kept[1].recv(1) == b"x"
        assert local.fileno() >= 0
        for end in (*kept, *lost):
            end.close()


def test_no_file_number_is_left_behind(listener, monkeypatch):
    """Also where a number was a socket's when it was read and is a pipe's when it is used."""
    spared, pipe = sever.open_sockets(), os.pipe()
    ends = connected(listener)
    before = len(os.listdir("/proc/self/fd"))
    assert sever.sever_all_but(spared) == 2
    monkeypatch.setattr(sever, "_sockets", lambda: {"socket:[1]": pipe[0], "socket:[2]": 10**6})
    assert sever.sever_all_but(()) == 0
    assert len(os.listdir("/proc/self/fd")) == before
    for number in pipe:
        os.close(number)
    for end in ends:
        end.close()
