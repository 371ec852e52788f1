package sessions

import "time"

// ticksPerHeartbeat is how many rounds of Watch fit in a heartbeat.
const ticksPerHeartbeat = 4

// WatchInterval is the time between two rounds of Watch.
func WatchInterval(heartbeat time.Duration) time.Duration { return heartbeat / ticksPerHeartbeat }

// Rounds returns how many rounds of Watch cover d.
func Rounds(d, heartbeat time.Duration) uint64 {
	interval := WatchInterval(heartbeat)
	return uint64((d + interval - 1) / interval)
}

// Watch calls round again and again until Close begins, with the number of the round.
// Time is counted in rounds, not read from a clock: when this process stands still
// (suspended, starved), its peers do not age.
func (e *Engine[S]) Watch(heartbeat time.Duration, round func(now uint64)) {
	ticker := time.NewTicker(WatchInterval(heartbeat))
	defer ticker.Stop()
	for {
		select {
		case <-ticker.C:
			round(e.Ticks.Add(1))
		case <-e.Ctx.Done():
			return
		}
	}
}

// Silence is what Watch remembers of a connection between its rounds.
type Silence struct {
	lastRx, lastTx         uint64
	silentTicks, idleTicks uint64
}

// Look takes the counts of what has come and gone on the connection, once a round.
// silent is for how many rounds nothing has come; beat says that nothing has gone for
// so long that a heartbeat is due.
func (w *Silence) Look(rx, tx uint64) (silent uint64, beat bool) {
	if rx != w.lastRx {
		w.lastRx, w.silentTicks = rx, 0
	} else {
		w.silentTicks++
	}
	if tx != w.lastTx {
		w.lastTx, w.idleTicks = tx, 0
	} else if w.idleTicks++; w.idleTicks >= ticksPerHeartbeat-1 {
		w.idleTicks, beat = 0, true
	}
	return w.silentTicks, beat
}
