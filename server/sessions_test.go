package server

import (
	"bytes"
	"encoding/binary"
	"errors"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/penstock-kv/penstock/rdma"
	"github.com/penstock-kv/penstock/server/access"
)

// sessionsOf returns Sessions with a policy that the test may replace. An argument of set is the name
// of a principal, and its subject after a colon if that is not CN= and the name. An argument of token
// is a subject without CN=.
func sessionsOf(t *testing.T) (s *Sessions, set func(principals ...string), token func(subject string) rdma.Token) {
	t.Helper()
	var policy *access.Policy
	s, err := NewSessions(rdma.Token("a secret of sixteen bytes or more"), nil, func() *access.Policy { return policy }, nil)
	if err != nil {
		t.Fatal(err)
	}
	set = func(principals ...string) {
		t.Helper()
		if policy = nil; len(principals) == 0 {
			return
		}
		text := "principals:\n"
		for _, name := range principals {
			subject := name
			if before, after, ok := strings.Cut(name, ":"); ok {
				name, subject = before, after
			}
			text += "  - {name: " + name + ", subjects: [CN=" + subject + "], grants: [{roles: [read], namespaces: [m]}]}\n"
		}
		if policy, err = access.Parse("roles.yaml", []byte(text)); err != nil {
			t.Fatal(err)
		}
	}
	token = func(subject string) rdma.Token {
		t.Helper()
		id, ok := policy.BySubject("CN=" + subject)
		if !ok {
			t.Fatalf("no principal with the subject %s", subject)
		}
		return s.token(withIdentity(t.Context(), id))
	}
	return s, set, token
}

// TestEngineBelongsToItsPrincipal: the id of an engine can be used again by the same principal, and by
// no other one, also while the engine has no session.
func TestEngineBelongsToItsPrincipal(t *testing.T) {
	s, set, token := sessionsOf(t)
	engine, before := rdma.EngineID{1}, rdma.EngineID{2}
	shared := s.token(t.Context())
	if err := s.admit(before, shared); err != nil {
		t.Fatal(err)
	}
	set("a", "b")
	a, b := token("a"), token("b")
	for i, c := range []struct {
		engine rdma.EngineID
		token  rdma.Token
		want   error
	}{
		{engine, a, nil},
		{engine, a, nil},
		{engine, b, errTaken},
		{engine, shared, errRemoved},
		{engine, rdma.Token("a token of no credential"), errRemoved},
		{before, b, nil}, // its session was opened before there were principals
		{before, a, errTaken},
	} {
		if err := s.admit(c.engine, c.token); !errors.Is(err, c.want) {
			t.Errorf("attempt %d: %v, want %v", i, err, c.want)
		}
	}
	if id, ok := s.identity(s.policy, engine); !ok || id.Principal.Name() != "a" {
		t.Errorf("the engine belongs to %v", id.Principal)
	}
	set("b")
	if err := s.admit(engine, a); !errors.Is(err, errRemoved) {
		t.Errorf("the token of a removed principal: %v", err)
	}
	if got := s.removed([]rdma.Peer{{ID: engine}, {ID: before}, {ID: rdma.EngineID{3}}}); len(got) != 2 || got[0] != engine {
		t.Errorf("engines without a principal: %v; want the one of a and the unknown one", got)
	}
	set()
	if err := s.admit(rdma.EngineID{4}, s.token(t.Context())); err != nil {
		t.Errorf("without a roles file: %v", err)
	}
	if got := s.removed([]rdma.Peer{{ID: engine}}); got != nil {
		t.Errorf("without a roles file the sessions of %v would end", got)
	}
}

// TestEngineBelongsByThePresentPolicy: the principal of an engine is that of its credential in the
// roles file in use. A rename does not change it. When the credential was replaced, the name decides.
func TestEngineBelongsByThePresentPolicy(t *testing.T) {
	engine := rdma.EngineID{1}
	for name, c := range map[string]struct {
		then    []string // the roles file after the reload
		subject string   // of the next client; "": it has the token without roles
		want    error
	}{
		"renamed":                           {[]string{"new:a", "b"}, "a", nil},
		"renamed, another one has the name": {[]string{"new:a", "a:b"}, "a", nil},
		"the one that has the name":         {[]string{"new:a", "a:b"}, "b", errTaken},
		"another one after a rename":        {[]string{"new:a", "b"}, "b", errTaken},
		"its new credential":                {[]string{"a:a2", "b"}, "a2", nil},
		"another one after a replacement":   {[]string{"a:a2", "b"}, "b", errTaken},
		"another one after the removal":     {[]string{"b"}, "b", nil},
		"without a roles file":              {nil, "", nil},
	} {
		s, set, token := sessionsOf(t)
		set("a", "b")
		if err := s.admit(engine, token("a")); err != nil {
			t.Fatal(err)
		}
		set(c.then...)
		next := s.token(t.Context())
		if c.subject != "" {
			next = token(c.subject)
		}
		if err := s.admit(engine, next); !errors.Is(err, c.want) {
			t.Errorf("%s: %v, want %v", name, err, c.want)
		}
	}
}

// TestOwnerWithoutRolesFile: while there is no roles file, every engine is open to a call that began
// before the file was removed. A session that was opened then has no principal when the file returns,
// although its engine had one before.
func TestOwnerWithoutRolesFile(t *testing.T) {
	s, set, token := sessionsOf(t)
	engine := rdma.EngineID{1}
	set("a")
	if err := s.admit(engine, token("a")); err != nil {
		t.Fatal(err)
	}
	id, _ := s.roles().BySubject("CN=a")
	began := withIdentity(t.Context(), id)
	set()
	if err := s.admit(engine, s.token(t.Context())); err != nil {
		t.Fatal(err)
	}
	if err := s.own(began, rdma.EngineID{2}); err != nil {
		t.Errorf("without a roles file: %v", err)
	}
	if engines, all := s.ownAll(began, func() []rdma.Peer { return nil }); engines != nil || !all {
		t.Errorf("without a roles file a window is open to %v only", engines)
	}
	set("a")
	if id, ok := s.identity(s.roles(), engine); ok {
		t.Errorf("the session has the roles of %s", id.Principal.Name())
	}
}

// TestSessionsOfOnePrincipalAreLimited: a principal cannot use all sessions of the data plane. Its
// engines that connect again are admitted, and so are the engines of another principal. An engine whose
// session has ended, or whose handshake led to none, is not counted.
func TestSessionsOfOnePrincipalAreLimited(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s, set, token := sessionsOf(t)
		set("a", "b")
		var live []rdma.Peer
		s.watch(func() []rdma.Peer { return live })
		engine := func(i int) (id rdma.EngineID) {
			binary.LittleEndian.PutUint64(id[:], uint64(i)+1)
			return id
		}
		admit := func(i int, principal string, want error) {
			t.Helper()
			if err := s.admit(engine(i), token(principal)); !errors.Is(err, want) || want != nil && !strings.Contains(err.Error(), `principal "a" has sessions with 256 engines`) {
				t.Fatalf("engine %d of %s: %v, want %v", i, principal, err, want)
			}
		}
		for i := range 256 {
			admit(i, "a", nil)
			if i%2 == 0 { // the handshakes of the others are in progress
				live = append(live, rdma.Peer{ID: engine(i)})
			}
		}
		admit(256, "a", rdma.ErrBusy)
		admit(0, "a", nil)
		admit(1, "a", nil)
		admit(1000, "b", nil)
		time.Sleep(openingMax) // the handshakes in progress have failed
		for i := range 128 {
			admit(256+i, "a", nil)
		}
		admit(600, "a", rdma.ErrBusy)
		admit(1, "a", rdma.ErrBusy)
		live = live[1:]
		admit(600, "a", nil)
		admit(601, "a", rdma.ErrBusy)
		set()
		for i := range 300 {
			if err := s.admit(engine(2000+i), s.token(t.Context())); err != nil {
				t.Fatalf("without a roles file: %v", err)
			}
		}
	})
}

// TestHandedOutTokenIsNoKey: the token that a client got before the node had a roles file derives no
// token of a credential, although credentials are public.
func TestHandedOutTokenIsNoKey(t *testing.T) {
	s, set, token := sessionsOf(t)
	shared := s.token(t.Context())
	set("a")
	for _, c := range s.roles().Credentials() {
		forged := (&Sessions{secret: shared}).derive(party{credential: c})
		if slices.ContainsFunc(s.accepted(), func(t rdma.Token) bool { return bytes.Equal(t, forged) }) {
			t.Error("the data plane accepts a token that was derived from the shared one")
		}
		if err := s.admit(rdma.EngineID{1}, forged); !errors.Is(err, errRemoved) {
			t.Errorf("a token that was derived from the shared one: %v", err)
		}
	}
	if err := s.admit(rdma.EngineID{1}, token("a")); err != nil {
		t.Errorf("the token of a: %v", err)
	}
}

// TestEnginesAreForgotten: the number of engines that are kept is limited. Engines with a session stay.
func TestEnginesAreForgotten(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s, set, token := sessionsOf(t)
		set("a")
		live := []rdma.Peer{{ID: rdma.EngineID{15: 1}}, {ID: rdma.EngineID{15: 2}}}
		s.watch(func() []rdma.Peer { return live })
		for _, p := range live {
			if err := s.admit(p.ID, token("a")); err != nil {
				t.Fatal(err)
			}
		}
		for i := range 3 * enginesMax {
			var id rdma.EngineID
			binary.LittleEndian.PutUint64(id[:], uint64(i)+1)
			if i%128 == 0 {
				time.Sleep(openingMax) // the handshakes of the previous engines have ended
			}
			if err := s.admit(id, token("a")); err != nil {
				t.Fatal(err)
			}
			if len(s.engines) > enginesMax+2 {
				t.Fatalf("%d engines are kept", len(s.engines))
			}
		}
		for _, p := range live {
			if _, ok := s.identity(s.policy, p.ID); !ok {
				t.Errorf("engine %v, which has a session, was forgotten", p.ID)
			}
		}
	})
}

// TestLaterCall: a call that has not begun is replaced by the next one, and stop prevents it or waits
// for its end.
func TestLaterCall(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		l := laterCall{after: time.Minute}
		began, calls, ended := time.Now(), 0, false
		l.start(func() { t.Error("the first call was not replaced") })
		time.Sleep(40 * time.Second)
		l.start(func() {
			if calls++; time.Since(began) != 100*time.Second {
				t.Errorf("called after %v", time.Since(began))
			}
			time.Sleep(time.Second)
			ended = true
		})
		time.Sleep(time.Minute)
		synctest.Wait()
		l.stop()
		if calls != 1 || !ended {
			t.Errorf("at the end of stop: %d calls, ended: %v", calls, ended)
		}
		l.start(func() { t.Error("called after stop") })
		time.Sleep(time.Hour)
	})
}
