package webmux_test

import (
	"net/http"
	"net/http/httptest"
	"slices"
	"testing"

	"github.com/penstock-kv/penstock/internal/webmux"
)

// TestPatterns: the list has each pattern that answers, and requests reach the handler of their pattern.
func TestPatterns(t *testing.T) {
	var m webmux.Mux
	m.HandleFunc("POST /b", func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(http.StatusAccepted) })
	m.Handle("/a/", http.NotFoundHandler())
	if got, want := m.Patterns(), []string{"/a/", "POST /b"}; !slices.Equal(got, want) {
		t.Errorf("the patterns are %q; want %q", got, want)
	}
	for method, want := range map[string]int{http.MethodPost: http.StatusAccepted, http.MethodGet: http.StatusMethodNotAllowed} {
		w := httptest.NewRecorder()
		m.ServeHTTP(w, httptest.NewRequest(method, "/b", nil))
		if w.Code != want {
			t.Errorf("%s /b is answered with %d; want %d", method, w.Code, want)
		}
	}
}
