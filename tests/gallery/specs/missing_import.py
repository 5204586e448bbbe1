import flashgem
