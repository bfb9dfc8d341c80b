"""Further parts where the server may lie: SuperNodes with keys of their own, called parties."""
