{{- /* Envoy's configuration: two listeners, and the clusters behind them. */ -}}
{{- define "paceline.envoy" -}}
{{- $root := . }}
{{- $name := include "paceline.name" . }}
static_resources:
  listeners:
    {{- include "paceline.listener" (dict "port" 7431 "clusters" (list "verifiers")) | nindent 4 }}
    {{- $drafters := list }}
    {{- if .Values.coLocated }}
    {{- $drafters = list "drafters" }}
    {{- else }}
    {{- range .Values.drafters }}
    {{- $drafters = append $drafters (printf "drafter-%s-%s" .name .version) }}
    {{- end }}
    {{- end }}
    {{- include "paceline.listener" (dict "port" 7432 "clusters" $drafters) | nindent 4 }}
  clusters:
    {{- $hosts := list }}
    {{- range $index := until (int .Values.verifier.count) }}
    {{- $hosts = append $hosts (printf "%s-verifier-%d" $name $index) }}
    {{- end }}
    {{- include "paceline.cluster" (dict "root" $root "name" "verifiers" "hosts" $hosts "port" 7431 "sticky" true) | nindent 4 }}
    {{- if .Values.coLocated }}
    {{- include "paceline.cluster" (dict "root" $root "name" "drafters" "hosts" $hosts "port" 7432 "sticky" true) | nindent 4 }}
    {{- else }}
    {{- range .Values.drafters }}
    {{- $component := printf "drafter-%s-%s" .name .version }}
    {{- include "paceline.cluster" (dict "root" $root "name" $component "hosts" (list (printf "%s-%s" $name $component)) "port" 7432 "sticky" false) | nindent 4 }}
    {{- end }}
    {{- end }}
{{- end }}

{{- define "paceline.listener" -}}
- address: {socket_address: {address: 0.0.0.0, port_value: {{ .port }}}}
  filter_chains:
    - transport_socket:
        name: envoy.transport_sockets.tls
        typed_config:
          "@type": type.googleapis.com/envoy.extensions.transport_sockets.tls.v3.DownstreamTlsContext
          common_tls_context:
            alpn_protocols: [h2]
            tls_certificates:
              - certificate_chain: {filename: /run/paceline/tls.crt}
                private_key: {filename: /run/paceline/tls.key}
      filters:
        - name: envoy.filters.network.http_connection_manager
          typed_config:
            "@type": type.googleapis.com/envoy.extensions.filters.network.http_connection_manager.v3.HttpConnectionManager
            stat_prefix: paceline_{{ .port }}
            codec_type: HTTP2
            # Streams last as long as a generation does.
            stream_idle_timeout: 0s
            http_filters:
              - name: envoy.filters.http.router
                typed_config:
                  "@type": type.googleapis.com/envoy.extensions.filters.http.router.v3.Router
            route_config:
              virtual_hosts:
                - name: all
                  domains: ["*"]
                  routes:
                    - match: {prefix: /}
                      route:
                        timeout: 0s
                        hash_policy:
                          - header: {header_name: paceline-client}
                        weighted_clusters:
                          clusters:
                            {{- range .clusters }}
                            - {name: {{ . }}, weight: 1}
                            {{- end }}
{{- end }}

{{- define "paceline.cluster" -}}
- name: {{ .name }}
  type: STRICT_DNS
  connect_timeout: 5s
  lb_policy: {{ ternary "RING_HASH" "LEAST_REQUEST" .sticky }}
  typed_extension_protocol_options:
    envoy.extensions.upstreams.http.v3.HttpProtocolOptions:
      "@type": type.googleapis.com/envoy.extensions.upstreams.http.v3.HttpProtocolOptions
      explicit_http_config:
        http2_protocol_options:
          connection_keepalive: {interval: 30s, timeout: 10s}
  health_checks:
    - timeout: 5s
      interval: 5s
      unhealthy_threshold: 2
      healthy_threshold: 1
      grpc_health_check: {}
  transport_socket:
    name: envoy.transport_sockets.tls
    typed_config:
      "@type": type.googleapis.com/envoy.extensions.transport_sockets.tls.v3.UpstreamTlsContext
      sni: localhost
      common_tls_context:
        alpn_protocols: [h2]
        validation_context:
          trusted_ca: {filename: /run/paceline/tls.crt}
  load_assignment:
    cluster_name: {{ .name }}
    endpoints:
      - lb_endpoints:
          {{- $root := .root }}
          {{- $port := .port }}
          {{- range $index, $host := .hosts }}
          - endpoint:
              address: {socket_address: {address: {{ $host }}, port_value: {{ $port }}}}
            {{- if $root.Values.coLocated }}
            # The same key on both ports: a client controls the drafter beside its verifier.
            metadata: {filter_metadata: {envoy.lb: {hash_key: {{ $host }}}}}
            {{- end }}
          {{- end }}
{{- end }}
