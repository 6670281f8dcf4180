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
    kept = connected(listener)
    spared = sever.open_sockets()
    lost, pair = connected(listener), socket.socketpair()
    assert sever.sever_all_but(spared) == 2
    assert lost[0].recv(1) == lost[1].recv(1) == b""
    for one, other in (kept, pair):  # processes of one machine talk by pairs, which are no connections to ranks
        one.sendall(b"x")
        assert other.recv(1) == b"x"
    for end in (*kept, *lost, *pair):
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
