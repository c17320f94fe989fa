"""D0, the draft device: ``coordinator`` handles one request, ``scheduler`` several."""
