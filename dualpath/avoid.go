package dualpath

// An engine whose attempts end at once looks idle, and an idle engine is what gets
// the next request: without memory of failures a node with a pulled cable takes
// everything that comes, and every retry.
//
// So a request that failed avoids both engines of that attempt (which of them was
// to blame, or the network between them, nobody knows), and an engine that failed
// strikesMax times with no request served in between is avoided by all for
// Options.Cooldown. Avoided means last: with nobody else it is taken still.

// strikesMax is how many failures in a row make an engine avoided: one may be the
// other engine's doing.
const strikesMax = 2

// strike notes that an attempt on the engine failed.
func (p *Planner) strike(en *engine) {
	en.strikes++
	if en.strikes >= strikesMax {
		en.avoidUntil = p.now + p.opts.Cooldown
		p.avoidUntil = max(p.avoidUntil, en.avoidUntil)
	}
}

// served notes that the engine did its part.
func (en *engine) served() { en.strikes, en.avoidUntil = 0, 0 }

// avoids reports whether the request should rather go elsewhere than to en.
func (p *Planner) avoids(r *request, en *engine) bool {
	if r.failures > 0 && (r.avoid[0] == en.id || r.avoid[1] == en.id) {
		return true
	}
	return p.now < en.avoidUntil
}

// careful reports whether avoids can be true of any engine for the request.
func (p *Planner) careful(r *request) bool { return r.failures > 0 || p.now < p.avoidUntil }

// avoidsAll reports whether the request should rather go elsewhere than to any
// engine of the group that takes it.
func (p *Planner) avoidsAll(r *request, g *group) bool {
	for _, en := range g.engines {
		if !p.avoids(r, en) && p.takes(en, r) {
			return false
		}
	}
	return true
}

// othersTake reports whether there is another group of g's role that keeps the role, heard
// within Options.Patience, with an engine that the request need not avoid.
func (p *Planner) othersTake(r *request, g *group) bool {
	for _, o := range p.order {
		if o != g && o.role == g.role && !o.switching() && p.now-o.heard <= p.opts.Patience && !p.avoidsAll(r, o) {
			return true
		}
	}
	return false
}
