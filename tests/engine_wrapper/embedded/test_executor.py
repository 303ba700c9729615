def test_idle_iterations_poll_transfers_and_nothing_else(make_recorded_llm):
    llm, record = make_recorded_llm()
    record.calls.clear()
    assert llm.executor.step() is False
    llm.executor.poll_transfers()
    assert record.names() == ["get_finished"] * 2
