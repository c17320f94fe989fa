"""D0, the draft device: ``draft_session`` handles one request, ``scheduler`` several."""
